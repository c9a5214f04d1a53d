"""What an encoding does to a model, beyond one static table of rotary frequencies."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Effects:
    """What an encoding does to a model, beyond one static table of rotary frequencies.

    Code that supports only some encodings asks this record, not the encoding's class.

    Attributes:
        depends_on_length: whether the rotary table changes with the length of the text.
        per_row: whether every token of a row uses the table of the row's whole length.
        rotates_in_attention: whether attention turns queries and keys on, from plain RoPE to their own table.
        scales_logits: whether the attention logits of a query have a factor.
        scales_by_position: whether that factor changes with the query's position.
        decays: whether the product of a query and a key shrinks with their distance.
        start_tokens: positions below this keep plain RoPE's angles.
        adds_bias: whether a bias is added to the attention logits, instead of RoPE.
        adds_vectors: whether vectors are added to the token embeddings, instead of RoPE.
        replaces_softmax: whether attention is a sum that is carried from token to token.
        remaps: whether distant pairs of a query and a key are rotated in another way than near ones.
    """

    depends_on_length: bool = False
    per_row: bool = False
    rotates_in_attention: bool = False
    scales_logits: bool = False
    scales_by_position: bool = False
    decays: bool = False
    start_tokens: int = 0
    adds_bias: bool = False
    adds_vectors: bool = False
    replaces_softmax: bool = False
    remaps: bool = False

    @property
    def rotary(self) -> bool:
        """Whether the encoding is a rotary schedule."""
        return not (self.adds_bias or self.adds_vectors or self.replaces_softmax)

    @property
    def in_attention(self) -> bool:
        """Whether a part of the encoding is computed inside the attention function."""
        return self.rotates_in_attention or self.scales_logits or self.adds_bias or self.replaces_softmax

    @property
    def is_one_table(self) -> bool:
        """Whether one table of frequencies and one attention factor say all that the encoding does."""
        return not self.reason()

    def reason(self) -> str:
        """Why one table does not say all that the encoding does, as a clause; empty if it does."""
        if self.adds_vectors:
            return "it adds vectors to the token embeddings instead of rotating"
        if not self.rotary:
            return "it acts inside attention, with or instead of a rotation"
        if self.remaps:
            return "it rotates distant pairs of tokens in another way than near ones, inside attention"
        if self.decays:
            return "the product of a query and a key shrinks with their distance"
        if self.scales_logits:
            return "it scales attention logits in addition to the rotation"
        if self.start_tokens:
            return f"its first {self.start_tokens} positions keep plain RoPE's angles"
        if self.depends_on_length or self.rotates_in_attention:
            return "its table depends on the length of the text"
        return ""
