"""Half-width rotary: one value for each channel pair, `[batch, T, dim/2]`."""

from rope_extend.models.families import FamilyAdapter

ADAPTER = FamilyAdapter(
    model_types=("gpt_oss",),
    rotary_paths=("rotary_emb",),
    note="all channels of a head, one value for each pair",
    layout="once",
)
