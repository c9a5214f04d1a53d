"""What every position encoding has: parameters, a name, a kind, and the numbers it is computed from.

An encoding is a frozen dataclass that computes tensors. It knows no model and does no I/O.
There are three kinds, and linear attention. Each acts on one part of a model:

===================  ==========================================  ===================================
kind                 what it computes                            acts on
===================  ==========================================  ===================================
`RopeEncoding`       inverse frequencies, attention factor       the rotary module
`BiasEncoding`       a bias on the attention logits              the attention function
`AbsoluteEncoding`   vectors added to the token embeddings       the embedding output
`LinearAttention`    a feature map instead of softmax            the attention function
===================  ==========================================  ===================================
"""
