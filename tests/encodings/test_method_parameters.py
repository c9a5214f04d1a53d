"""Parameters that stand behind a method's name: `yarn(critical=17)`."""

from __future__ import annotations

from pathlib import Path

import pytest

import rope_extend as rx
from rope_extend.cli.main import parse
from rope_extend.encodings import method_named
from rope_extend.errors import RopeExtendError
from rope_extend.evaluation.evaluation_config import EvaluationConfig
from rope_extend.method_names import check_method_name, parse_method

SHAPE = rx.RopeShape(64, 100_000.0, 8192)


@pytest.mark.parametrize(
    ("text", "names", "parameters"),
    [
        ("yarn", ["yarn"], {}),
        ("yarn( beta_fast = 16 , beta_slow=2 )", ["yarn"], {"beta_fast": "16", "beta_slow": "2"}),
        (" short_original( yarn(critical=17) ) ", ["short_original", "yarn"], {"critical": "17"}),
        ("runs/a=b/my  factors", ["runs/a=b/my  factors"], {}),
    ],
)
def test_a_name_is_split_from_its_parameters(
    text: str, names: list[str], parameters: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    if "/" in text:
        Path(text).mkdir(parents=True)
        Path(text, "encoding.json").touch()
    assert parse_method(text) == (names, parameters)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("yarn(critical=17)", rx.encoding("yarn", factor=2.0, critical=17)),
        ("yarn(beta_fast=16,beta_slow=2)", rx.encoding("yarn", factor=2.0, beta_fast=16, beta_slow=2)),
        ("ntk(critical=theoretical)", rx.encoding("ntk", factor=2.0, critical="theoretical")),
        ("kerple(kernel=power)", rx.encoding("kerple", kernel="power")),
        (
            "short_original(yarn(critical=17))",
            rx.encoding("short_original", inner=rx.encoding("yarn", factor=2.0, critical=17)),
        ),
    ],
)
def test_the_encoding_has_them(text: str, expected: rx.Encoding) -> None:
    check_method_name(text)
    assert method_named(text).for_target(SHAPE, 16_384) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("yarn(critical=)", "pairs such as"),
        ("yarn(critical=1,critical=2)", "pairs such as"),
        ("yarn(betafast=3)", "unknown parameter 'betafast'"),
        ("alibi(slopes=1)", "alibi: unknown parameter 'slopes'; it takes no parameters"),
        ("yarn(factor=3)", "factor follows from target_length"),
        ("resonance(yarn", "as many closing ones"),
        ("yran(critical=17)", "Did you mean 'yarn'"),
    ],
)
def test_wrong_ones_are_refused(text: str, message: str) -> None:
    with pytest.raises(RopeExtendError, match=message):
        method_named(text).for_target(SHAPE, 16_384)


def test_commas_in_brackets_do_not_split_a_list() -> None:
    config = EvaluationConfig(model="unused", methods="none,yarn(beta_fast=16,beta_slow=2),ntk")
    assert config.methods == ("none", "yarn(beta_fast=16,beta_slow=2)", "ntk")
    assert parse(["demo", "--methods", "yarn(critical=5,beta_fast=9), ntk,"]).methods == [
        "yarn(critical=5,beta_fast=9)",
        "ntk",
    ]
