"""Texts whose tokens were recorded from llama.cpp: digits, spaces, lines, many scripts, special tokens."""

from __future__ import annotations

from pathlib import Path

RECORDED = Path(__file__).with_name("llama_cpp_tokens.json")
"""What `record_llama_cpp.py` has written."""

TEXTS = (
    "Hello, world!",
    "It was 1984, wasn't it? She'd ÜBER-slept:\n\n  twice\tor 3 times...  日本語 naïve — end \r\n",
    "The year 1984, 12345678901 and 3.14159; 0x7f",
    "   three leading, two  inner and trailing spaces   ",
    "line one\nline two\r\n\n\n\nafter four\n\ttab\t\ttabs",
    "don't we'll I'M they'Re you'VE it's",
    "naïve Čapek Ωμέγα 日本語のテキスト 한국어 العربية हिन्दी",
    "emoji 👩‍👩‍👧‍👦 🇨🇭 é and e\u0301",
    "<|im_start|>user\nWhat is <|im_start|> here?<|endoftext|>",
    "def f(x):\n    return {'a': [1, 2], \"b\": x**2}  # done\n",
    "CamelCaseWords snake_case_words SCREAMING_CASE $100,000.00 50% #1 @you",
    " ",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "It was the best of times, it was the worst of times—the age of wisdom… \u00a0\u2003wide\u3000spaces",
)
