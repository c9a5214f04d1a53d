"""Half-width rotary: one value for each pair, `[batch, T, dim/2]`, which the attention applies to halves."""

from rope_extend.families import FamilyAdapter

ADAPTER = FamilyAdapter(
    model_types=("gpt_oss",),
    rotary_paths=("rotary_emb",),
    note="all channels of a head, one value for each pair",
    widened="once",
)
