"""``python -m cute_fp8``: info, explain, autotune, compile, verify, validate, convert, demo."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from cute_fp8 import dispatch, settings
from cute_fp8.gemms.tuning import BEST, autotune
from cute_fp8.targets import TARGETS, Capability, check_target

if TYPE_CHECKING:
    from cute_fp8.evidence.inspection import Inspection


def main(arguments: list[str] | None = None) -> int:
    """Run the command line.

    Returns the exit status. Errors of use are one line on stderr and status 2.
    """
    options = _parser().parse_args(arguments)
    command: Callable[[argparse.Namespace], int] = options.run
    try:
        return command(options)
    except (RuntimeError, TypeError, ValueError) as error:
        print(f"cute_fp8 {options.command}: {error}", file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        print(
            f"cute_fp8 {options.command}: needs the package {error.name!r}: "
            "pip install 'cute-fp8[cli,models]'",
            file=sys.stderr,
        )
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m cute_fp8",
        description="FP8 GEMMs, and what feeds them, for sm_120, sm_121 and Hopper.",
    )
    commands = parser.add_subparsers(dest="command", required=True)

    info = commands.add_parser(
        "info", help="versions, GPUs, driver, installation, cache and the dispatch table"
    )
    info.add_argument("--json", action="store_true", help="without the table, as JSON")
    info.set_defaults(run=_info)

    _add_explain(commands.add_parser("explain", help="which route a call takes, and why"))
    tune = commands.add_parser(
        "autotune", help="time the best few configurations of a GEMM here, keep the fastest"
    )
    for name, what in (("m", "tokens"), ("n", "output channels"), ("k", "what is summed over")):
        tune.add_argument(name, type=int, help=what)
    tune.add_argument("--variant", default="per_token", choices=("per_token", "mxfp8"))
    tune.add_argument("--backend", choices=settings.BACKENDS, help="as if pinned by use()")
    tune.add_argument("--best", type=int, default=BEST, help="how many configurations to time")
    tune.set_defaults(run=_autotune)

    compile_ = commands.add_parser(
        "compile", help="compile kernels without a GPU, inspect them, apply the gates"
    )
    compile_.add_argument(
        "--arch", action="append", required=True, metavar="ARCH", help=", ".join(TARGETS)
    )
    compile_.add_argument("--ops", help="a glob over kernel names")
    compile_.add_argument(
        "--json", action="store_true", help="the data, as in perf/results/sm_120a"
    )
    compile_.set_defaults(run=_compile)

    validate = commands.add_parser(
        "validate", help="all that needs a GPU, on the one here; writes a file to send to us"
    )
    validate.add_argument("--out", metavar="FILE", help="the file's name")
    validate.add_argument("--quick", action="store_true", help="a first look, no evidence")
    validate.add_argument(
        "--sanitize", action="store_true", help="also run compute-sanitizer, if it is installed"
    )
    validate.add_argument(
        "--reports", nargs="+", metavar="XML", help="tests that ran already, by pytest --junitxml"
    )
    validate.set_defaults(run=_validate)

    verify = commands.add_parser("verify", help="prove kernels free of races and deadlocks")
    verify.add_argument(
        "--arch", action="append", required=True, metavar="ARCH", help=", ".join(TARGETS)
    )
    verify.add_argument("--ops", help="a glob over kernel names")
    verify.add_argument("--json", action="store_true", help="the data, as in perf/results/sm_120a")
    verify.set_defaults(run=_verify)

    _add_convert(
        commands.add_parser(
            "convert", help="a folder of safetensors to one with FP8 weights, file by file"
        )
    )
    demo = commands.add_parser("demo", help="a real model's linear layers in FP8, judged")
    demo.add_argument(
        "--json", metavar="FILE", help="also write the data to FILE ('-': to stdout, instead)"
    )
    demo.set_defaults(run=_demo)
    return parser


def _add_explain(explain: argparse.ArgumentParser) -> None:
    explain.add_argument(
        "sizes", type=int, nargs="+", metavar="SIZE", help="M N K of a GEMM, M K of a producer"
    )
    explain.add_argument("--op", default="gemm", choices=dispatch.OPS)
    explain.add_argument(
        "--capability", type=_capability, help="of a GPU that need not be here, e.g. 12.0"
    )
    explain.add_argument("--gpu", help="one that need not be here, e.g. 'RTX 5090'")
    explain.add_argument("--variant", default="per_token", choices=("per_token", "mxfp8", "any"))
    explain.add_argument("--backend", choices=settings.BACKENDS, help="as if pinned by use()")
    explain.add_argument("--config", help="a pinned configuration, by name")
    explain.set_defaults(run=_explain)


def _add_convert(convert: argparse.ArgumentParser) -> None:
    convert.add_argument("source", metavar="IN", help="a folder of safetensors files")
    convert.add_argument(
        "target", metavar="OUT", help="a new folder, or one that an interrupted run has left"
    )
    convert.add_argument("--variant", default="per_token", choices=("per_token", "mxfp8"))
    for which, what in (("include", "only layers"), ("exclude", "no layers")):
        text = f"{what} of such names; may be repeated"
        convert.add_argument(f"--{which}", action="append", default=[], metavar="GLOB", help=text)
    convert.add_argument("--json", metavar="FILE", help="also write the report as JSON")
    convert.add_argument("--plot", metavar="FILE", help="also draw it into a PNG")
    convert.set_defaults(run=_convert)


def _capability(text: str) -> Capability:
    major, _, minor = text.partition(".")
    if not (major.isdigit() and minor.isdigit()):
        raise argparse.ArgumentTypeError(f"got {text!r}, must be like 12.0")
    return int(major), int(minor)


def _info(options: argparse.Namespace) -> int:
    from cute_fp8.environment import info, info_text

    facts = info()
    if options.json:
        print(json.dumps(facts, indent=2))
    else:
        print(f"{info_text(facts)}\n\n{dispatch.dispatch_table()}")
    return 0


def _explain(options: argparse.Namespace) -> int:
    if len(options.sizes) not in (2, 3):
        raise ValueError(f"sizes: got {len(options.sizes)}, must be M N K, or M K of a producer")
    with settings.use(config=options.config):
        explanation = dispatch.explain(
            options.op,
            m=options.sizes[0],
            n=options.sizes[1] if len(options.sizes) == 3 else None,
            k=options.sizes[-1],
            capability=options.capability,
            gpu=options.gpu,
            variant=options.variant,
            backend=options.backend,
        )
    print(explanation)
    return 0 if explanation.route else 1


def _autotune(options: argparse.Namespace) -> int:
    shape = (options.m, options.n, options.k)
    print(autotune(shape, variant=options.variant, backend=options.backend, best=options.best))
    return 0


def _compile(options: argparse.Namespace) -> int:
    from cute_fp8.build import shipped
    from cute_fp8.evidence.files import inspection_evidence
    from cute_fp8.evidence.inspection import inspect_kernels
    from cute_fp8.tables import inspection_table, print_table, track

    for arch in options.arch:
        check_target(arch)  # before a progress bar is drawn
    total = sum(len(shipped.shipped_configs(options.ops, arch)) for arch in options.arch)
    found = list(track(inspect_kernels(options.arch, options.ops), "compiling", total))
    if options.json:
        print(json.dumps(inspection_evidence(found), indent=2))
    else:
        print_table(inspection_table(found))
    return report_failures(found)


def _verify(options: argparse.Namespace) -> int:
    from cute_fp8.evidence import verify
    from cute_fp8.evidence.files import verification_evidence
    from cute_fp8.tables import print_table, proof_table, track

    for arch in options.arch:
        check_target(arch)  # before a progress bar is drawn
    total = len(options.arch) * len(verify.verified_configs(options.ops))
    proofs = list(track(verify.verify_kernels(options.arch, options.ops), "verifying", total))
    if options.json:
        print(json.dumps(verification_evidence(proofs), indent=2))
    else:
        print_table(proof_table(proofs))
    for proof in proofs:
        if not proof.proved:
            what = f"{proof.target} {proof.kernel}: {proof.result}, {proof.details}"
            print(f"not proved: {what}", file=sys.stderr)
    return int(any(proof.result not in (verify.PASS, verify.UNSUPPORTED) for proof in proofs))


def report_failures(found: Iterable[Inspection]) -> int:
    """Print every gate that failed; 1 if any did."""
    failed = [(i.target, i.kernel, failure) for i in found for failure in i.failures]
    for target, kernel, failure in failed:
        print(f"gate failed: {target} {kernel}: {failure}", file=sys.stderr)
    return 1 if failed else 0


def _validate(options: argparse.Namespace) -> int:
    from cute_fp8.evidence.validate import run

    return run(options.out, quick=options.quick, sanitize=options.sanitize, reports=options.reports)


def _convert(options: argparse.Namespace) -> int:
    from cute_fp8.models.folder import convert_folder

    for option in ("json", "plot"):  # before the work, not after it
        path = getattr(options, option)
        if path is not None and not Path(path).absolute().parent.is_dir():
            raise ValueError(f"--{option}: got {path}, must be in a folder that exists")
    report = convert_folder(
        options.source,
        options.target,
        variant=options.variant,
        include=options.include,
        exclude=options.exclude,
    )
    print(report.table())
    if options.json is not None:
        report.save_json(options.json)
    if options.plot is not None:
        report.plot(options.plot)
    return 0


def _demo(options: argparse.Namespace) -> int:
    from cute_fp8.demo.run import run

    torch.manual_seed(0)
    return run(options.json)
