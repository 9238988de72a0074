"""ARCHS.md is what the dispatch table and the evidence say, and says no more than they do."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cute_fp8 import environment
from cute_fp8.build import kernel_sources, shipped
from cute_fp8.dispatch import TABLE, Entry, _always
from cute_fp8.evidence import archs, verify
from cute_fp8.evidence.archs import (
    COLUMNS,
    EARLIER,
    INSPECTED,
    MEASURED,
    NO_EVIDENCE,
    RUN,
    STAND_IN,
    Row,
    cell,
    is_validated,
    kernel_of_tests,
    render,
    rows,
)
from cute_fp8.evidence.files import (
    RESULTS,
    Evidence,
    inspection_evidence,
    load,
    verification_evidence,
)
from cute_fp8.evidence.inspection import inspect_kernel
from cute_fp8.kernels.config import EpilogueConfig, GemmConfig
from cute_fp8.kernels.tiles import TILES

NATIVE = Entry("gemm", "per_token", "cute", "gemm_x", ((12, None),), _always, ("sm_120a",))
ASIDE = Entry("gemm", "per_token", "stand-in", "gemm_x", ((9, 0),), _always, ("sm_90a",))
TORCH = Entry("gemm", "per_token", "torch", "rowwise", ((8, 9), (9, 0)), _always)
REFERENCE = Entry("gemm", "per_token", "reference", "gemm", None, _always)
OTHER = Entry("gemm", "mxfp8", "reference", "gemm", None, _always)
MADE_UP = (NATIVE, ASIDE, TORCH, REFERENCE, OTHER)
ROW = Row("gemm", "per_token", "gemm_x")

#: What the made-up kernel's sources are in this tree, and were earlier.
HERE = "gemm_x=0123456789ab gemm_h=0 rows=0"
BEFORE = "gemm_x=ba9876543210"
GOOD: dict[str, Any] = {
    "kind": "validation",
    "meta": {
        "gpu": "NVIDIA GeForce RTX 5090",
        "capability": "12.0",
        "date": "2027-01-01",
        "kernels": HERE,
    },
    "backend": "cute",
    "tests": {
        "tests.kernels.test_gemm_x": {"passed": 10, "skipped": 12},
        "tests.kernels.test_gemm_x_large": {"passed": 2},
        "tests.test_gpu_integration": {"passed": 3},
    },
    "tier": [{"passed": True}],
    "covers": [{"op": "gemm", "variant": "per_token", "route": "cute:gemm_x"}],
    "rows": [
        {"op": "gemm", "variant": "per_token", "route": "cute:gemm_x", "us": 1.0},
        {"op": "gemm", "variant": "per_token", "impl": "torch_rowwise", "failed": "no"},
    ],
    "sanitizer": {"memcheck": {"clean": True}, "racecheck": {"clean": None}},
}


REAL = kernel_sources.digests()


@pytest.fixture(autouse=True)
def made_up_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    """The made-up kernels have sources, too."""
    here = kernel_sources.recorded(HERE)
    monkeypatch.setattr(kernel_sources, "digests", lambda: {**REAL, **here})


def validation(**changes: Any) -> Evidence:
    """The good one, with parts replaced."""
    return Evidence("made/up.json", {**copy.deepcopy(GOOD), **changes})


def hopper(**changes: Any) -> Evidence:
    """The same tests on an H200, through the stand-in."""
    covers = [{"op": "gemm", "variant": "per_token", "route": "stand-in:gemm_x"}]
    meta = {"gpu": "NVIDIA H200", "capability": "9.0", "kernels": HERE}
    changes = {"meta": meta, "backend": "stand-in", "covers": covers, "rows": [], **changes}
    return validation(**changes)


def inspection(*failures: str, target: str = "sm_120a", kernel: str = "gemm_per_token-a") -> Any:
    """One kernel of machine code."""
    found = [{"kernel": kernel, "target": target, "failures": list(failures)}]
    data = {"kind": "inspection", "meta": {"kernels": HERE}, "inspections": found}
    return Evidence(f"{target}/static.json", data)


def look(capability: Any, *evidence: Evidence, row: Row = ROW) -> str:
    return cell(row, capability, evidence, MADE_UP)


# ----------------------------------------------------------------------------- the file itself


def test_archs_md_is_up_to_date() -> None:
    assert archs.ARCHS.read_text(encoding="utf-8") == render(), "stale: run `make archs`"


def test_every_cell_says_one_of_five_things() -> None:
    """A kernel that nothing is shown of must not be committed."""
    evidence = load()
    for row in rows():
        for name, capability in COLUMNS:
            found = cell(row, capability, evidence)
            assert found != NO_EVIDENCE, f"{row} on {name}: run `make inspect archs`"
            found = found.removesuffix(EARLIER)
            words = (MEASURED, RUN, STAND_IN, INSPECTED)
            assert found in words or found.startswith("falls back to ")
            assert found != "falls back to nothing", f"{row} on {name}"


@pytest.mark.parametrize("target", ["sm_120a", "sm_121a", "sm_90a"])
def test_every_shipped_kernel_has_been_inspected(target: str) -> None:
    file = RESULTS / target / "static.json"
    data = json.loads(file.read_text(encoding="utf-8"))
    found = {i["kernel"] for i in data["inspections"] if i["target"] == target}
    names = {config.name for config in shipped.shipped_configs(target=target)}
    assert names <= found, "stale: run `make inspect archs`"


def test_every_gemm_of_sm_120_has_been_proved() -> None:
    """With the PTX that it has now: of two compiled again here, all others by their sources."""
    file = RESULTS / "sm_120a" / "verify.json"
    evidence = Evidence(file.name, json.loads(file.read_text(encoding="utf-8")))
    assert evidence.is_current("gemm_sm120"), "stale: run `make verify archs`"
    found = {proof["kernel"]: proof for proof in evidence.get("proofs", list)}
    gemms = [c for c in verify.verified_configs() if isinstance(c, GemmConfig)]
    assert {found[c.name]["result"] for c in gemms} == {verify.PASS}
    for config in (gemms[-1], gemms[9]):
        ptx = verify.build_ptx(replace(config, fix_up=False), "sm_120a")
        assert verify.digest_of(ptx) == found[config.name]["ptx"], config.name


def test_main_loops_are_as_lean_as_recorded() -> None:
    """Of a tile of each kind, within 5 % of what the committed inspection found."""
    data = json.loads((RESULTS / "sm_120a" / "static.json").read_text(encoding="utf-8"))
    recorded = {i["kernel"]: i["code"]["others_per_mma"] for i in data["inspections"]}
    for variant, tiles in TILES.items():
        for tile in (tiles[0], tiles[2], tiles[3], tiles[10]):
            config = GemmConfig(tile, EpilogueConfig(), variant)
            found = inspect_kernel(config, "sm_120a")
            assert found.failures == ()
            assert found.code.others_per_mma <= 1.05 * recorded[config.name], config.name


# ------------------------------------------------------------------------------------ the rules


def test_a_passing_validation_on_the_gpu_itself_is_a_measurement() -> None:
    assert look((12, 0), validation()) == MEASURED
    assert look((12, 0), inspection(), validation()) == MEASURED


@pytest.mark.parametrize(
    "changes",
    [
        {"tests": {"tests.kernels.test_gemm_x": {"passed": 9, "failed": 1}}},
        {"tests": {"tests.kernels.test_gemm_x": {"passed": 9, "error": 1}}},
        {"tests": {"tests.kernels.test_gemm_x": {"skipped": 22}}},
        {"tests": {"tests.kernels.test_gemm_y": {"passed": 10}}},
        {"tests": {**GOOD["tests"], "tests.test_gpu_integration": {"failed": 1}}},
        {"tests": {"tests.kernels.test_gemm_x": {"passed": 9, "missing": 1}}},
        {"tests": {}},
        {"covers": []},
        {"covers": [{"op": "gemm", "variant": "mxfp8", "route": "cute:gemm_x"}]},
        {"covers": [{"op": "gemm", "variant": "per_token", "route": "torch:rowwise"}]},
        {"sanitizer": {"racecheck": {"clean": False}}},
        {"errors": {"rows": "RuntimeError: out of memory"}},
        {"rows": [{**GOOD["rows"][0], "failed": "wrong"}]},
        {"meta": {"gpu": "NVIDIA GeForce RTX 5090"}},
        {"meta": {"capability": "12.1"}},
        {"kind": "sweep"},
        {"tests": None, "covers": None, "rows": None, "meta": None},
    ],
)
def test_anything_less_is_none(changes: dict[str, Any]) -> None:
    assert look((12, 0), validation(**changes)) == NO_EVIDENCE
    assert look((12, 0), validation(**changes), inspection()) == INSPECTED


@pytest.mark.parametrize("rows", [[], [{**GOOD["rows"][0], "route": "torch:rowwise"}]])
def test_what_was_not_timed_has_run(rows: list[Any]) -> None:
    assert look((12, 0), validation(rows=rows), inspection()) == RUN


def test_what_another_kernel_gets_wrong_is_not_held_against_this_one() -> None:
    other = Entry("gemm", "mxfp8", "cute", "gemm_y", ((12, None),), _always, ("sm_120a",))
    tests = {**GOOD["tests"], "tests.kernels.test_gemm_y": {"failed": 5}}
    assert cell(ROW, (12, 0), [validation(tests=tests)], (*MADE_UP, other)) == MEASURED


@pytest.mark.parametrize("layer", ["decoder", "models"])
def test_what_a_layer_gets_wrong_is_held_against_its_own_kernels(layer: str) -> None:
    failing = {f"tests.{layer}.test_tracing": {"failed": 1}}
    assert look((12, 0), validation(tests={**GOOD["tests"], **failing})) == MEASURED
    mlp = next(entry for entry in TABLE if entry.kernel == "mlp")
    passing = {**GOOD["tests"], "tests.kernels.test_mlp": {"passed": 3}}
    for tests, good in ((passing, True), ({**passing, **failing}, False)):
        found = validation(tests=tests, meta={**GOOD["meta"], "kernels": kernel_sources.as_line()})
        assert archs.is_validated(found, mlp, (12, 0), {"mlp", "gemm_x"}) is good


def test_a_peripheral_step_that_broke_off_is_not_held_against_it() -> None:
    assert look((12, 0), validation(errors={"host_us": "RuntimeError"})) == MEASURED


def test_one_good_validation_is_enough() -> None:
    assert look((12, 0), validation(covers=[]), validation()) == MEASURED


def test_a_measurement_holds_for_its_own_architecture_only() -> None:
    spark = validation(meta={"capability": "12.1", "kernels": HERE})
    for capability, expected in (((12, 0), NO_EVIDENCE), ((12, 1), MEASURED)):
        assert look(capability, spark) == expected


def test_the_stand_in_is_never_a_measurement() -> None:
    timed = [{**GOOD["rows"][0], "route": "stand-in:gemm_x"}]
    assert look((9, 0), hopper(rows=timed)) == STAND_IN
    assert look((12, 0), hopper(rows=timed)) == NO_EVIDENCE
    # Nor does a native file's passing on another GPU say anything here.
    assert look((9, 0), validation()) == "falls back to torch `_scaled_mm`"


def test_a_stand_in_that_fails_is_not_named() -> None:
    failing = hopper(tests={"tests.kernels.test_gemm_x": {"passed": 9, "failed": 1}})
    assert look((9, 0), failing) == "falls back to torch `_scaled_mm`"
    assert look((9, 0), inspection(target="sm_90a")) == "falls back to torch `_scaled_mm`"


def test_inspection() -> None:
    assert look((12, 0), inspection()) == INSPECTED
    assert look((12, 0), inspection(kernel="gemm_x-tile")) == INSPECTED
    for no_evidence in (
        inspection("2 spills"),
        inspection(target="sm_121a"),
        inspection(kernel="gemm_mxfp8-a"),
        inspection(kernel="gemm_per_tokenish-a"),
    ):
        assert look((12, 0), no_evidence) == NO_EVIDENCE
    old = Evidence("old.json", {**inspection().data, "meta": {"kernels": BEFORE}})
    assert look((12, 0), old) == INSPECTED + EARLIER


def test_fallbacks() -> None:
    assert look((8, 9), validation()) == "falls back to torch `_scaled_mm`"
    assert look((7, 5), validation()) == "falls back to the reference"
    assert look(None, validation()) == "falls back to the reference"
    assert look((12, 0), validation(), row=Row("gemm", "mxfp8", None)) == (
        "falls back to the reference"
    )


def test_two_kernels_of_one_op_have_a_row_each() -> None:
    hopper_kernel = Entry("gemm", "per_token", "cute", "gemm_h", ((9, 0),), _always, ("sm_90a",))
    table = (hopper_kernel, *MADE_UP)
    assert rows(table) == [
        Row("gemm", "per_token", "gemm_h"),
        ROW,
        Row("gemm", "mxfp8", None),
    ]
    assert cell(Row("gemm", "per_token", "gemm_h"), (12, 0), [], table) == "falls back to `gemm_x`"
    assert cell(ROW, (9, 0), [], table) == "falls back to `gemm_h`"
    assert cell(ROW, (9, 0), [hopper()], table) == STAND_IN


def test_ops_without_tier_checks_need_their_tests_only() -> None:
    producer = Entry("quantize", "fp8", "stand-in", "rows", ((9, 0),), _always, ("sm_90a",))
    done = hopper(covers=[], tests={"tests.kernels.test_rows": {"passed": 4}})
    assert cell(Row("quantize", "fp8", "rows"), (9, 0), [done], (producer,)) == STAND_IN


@pytest.mark.parametrize(
    ("module", "kernel"),
    [
        ("tests.kernels.test_gemm_x", "gemm_x"),
        ("tests.kernels.test_gemm_x_large", "gemm_x"),
        ("tests.kernels.test_gemm_x.TestClass", "gemm_x"),
        ("tests.kernels.test_gemm_x_mx_edges", "gemm_x_mx"),
        ("tests.kernels.test_gemm_xy", None),
        ("tests.test_gpu_integration", None),
        ("?", None),
    ],
)
def test_whose_tests_a_module_has(module: str, kernel: str | None) -> None:
    assert kernel_of_tests(module, {"gemm_x", "gemm_x_mx"}) == kernel


# ------------------------------------------------------------------------------- files and text


def test_load_takes_evidence_and_nothing_else(tmp_path: Path) -> None:
    for name, data in {
        "b/validation.json": GOOD,
        "a/static.json": inspection().data,
        "quick.json": {**GOOD, "quick": True},
        "sweep.json": {"meta": {}, "rows": []},
        "list.json": [1],
    }.items():
        file = tmp_path / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(json.dumps(data))
    assert [e.name for e in load(tmp_path)] == ["a/static.json", "b/validation.json"]


def test_render() -> None:
    text = render([validation(), inspection("2 spills")], MADE_UP)
    matrix = [line for line in text.splitlines() if line.startswith("|")]
    assert "| gemm, per token x per channel: `gemm_x` | measured | no evidence | falls " in text
    assert "| gemm, MXFP8 | falls back to the reference |" in text
    assert any(line.startswith("| quantisers | falls back to the reference") for line in matrix)
    assert "[made/up.json](perf/results/made/up.json) | NVIDIA GeForce RTX 5090 (12.0), " in text
    assert (
        "cute: 15 tests passed, 0 failed; 1 of 1 tier checks; 1 timings; memcheck clean |" in text
    )
    assert "| 1 kernels, 1 fail a gate |" in text
    tables = [part.splitlines() for part in text.split("\n\n") if part.startswith("|")]
    assert sum(map(len, tables)) == len(matrix) and len(tables) == 4
    for table in tables:
        assert len({line.count("|") for line in table}) == 1


def test_timings_are_listed_and_fill_no_cell(tmp_path: Path) -> None:
    rows = [
        {"route": "cute:gemm_x", "us": 1.0},
        {"route": "cute:gemm_x", "failed": "wrong"},
        {"impl": "torch", "us": 2.0},
    ]
    data = {"meta": {"gpu": "NVIDIA H200", "kernels": f"{HERE} gemm_y=0"}, "rows": rows}
    (tmp_path / "sweep.json").write_text(json.dumps(data))
    (tmp_path / "peers.json").write_text(json.dumps({**data, "rows": rows[1:]}))
    (found,) = load(tmp_path)
    assert found.timed() == {"gemm_x": 1}
    assert "| these | 1 timings of gemm_x |" in render([found], MADE_UP)
    assert look((12, 0), found) == NO_EVIDENCE


def test_evidence_of_other_kernel_sources_says_so() -> None:
    meta = {key: value for key, value in GOOD["meta"].items() if key != "kernels"}
    for changes, word, suffix in (
        ({}, "not recorded", EARLIER),
        ({"kernels": HERE}, "these", ""),
        ({"kernels": BEFORE}, "others", EARLIER),
        ({"kernels": "0123456789ab"}, "others", EARLIER),
        ({"kernels": f"{HERE} gemm_y=0"}, "these, but of gemm_y", ""),
        ({"kernels": f"{BEFORE} relayout={REAL['relayout']}"}, "these, but of gemm_x", EARLIER),
    ):
        evidence = validation(meta={**meta, **changes})
        text = render([evidence], MADE_UP)
        assert f" | {word} | cute: 15 tests passed, 0 failed; " in text
        assert look((12, 0), evidence) == MEASURED + suffix
    assert look((12, 0), validation(meta=meta), validation()) == MEASURED


def test_an_op_of_which_only_tests_speak_is_shown_by_those_of_this_tree() -> None:
    table = (replace(MADE_UP[0], op="another"),)
    row = replace(ROW, op="another")
    old = validation(meta={**GOOD["meta"], "kernels": BEFORE})
    assert not is_validated(old, table[0], (12, 0), {"gemm_x"})
    assert is_validated(validation(), table[0], (12, 0), {"gemm_x"})
    assert cell(row, (12, 0), [old], table) == NO_EVIDENCE


def test_new_evidence_records_its_kernel_sources() -> None:
    for made in (inspection_evidence([]), verification_evidence([])):
        assert made["meta"]["kernels"] == environment.environment()["kernels"]
        found = Evidence("made/up.json", made).kernels()
        assert {"gemm_sm120", "gemm_sm90", "relayout", "row_quantize"} <= found.keys()
        assert all(found.values())


def test_the_real_table_has_a_row_for_every_kernel() -> None:
    named = {(row.op, row.variant, row.kernel) for row in rows()}
    assert {(e.op, e.variant, e.kernel) for e in TABLE if e.targets} <= named
    assert {(e.op, e.variant) for e in TABLE} == {(op, variant) for op, variant, _ in named}


def test_main_needs_a_checkout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(archs, "ROOT", tmp_path)
    assert archs.main() == 2
    assert capsys.readouterr().err.startswith("cute_fp8.evidence.archs: got an installed package")


def test_main_writes_what_render_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archs, "ARCHS", tmp_path / "ARCHS.md")
    assert archs.main() == 0
    assert (tmp_path / "ARCHS.md").read_text(encoding="utf-8") == render()
