"""The shapes of a sweep: named sets (``cute_fp8/shapes.py``), lists and ranges."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from cute_fp8.shapes import SETS, Shape

#: What the dry run multiplies: enough for every path, and edges.
DRY = ((1, 32, 64), (16, 32, 64), (300, 32, 64), (33, 24, 128))


def small(shapes: Iterable[Shape]) -> list[Shape]:
    """The shapes cut down to what a CPU multiplies at once, those that become equal once."""
    return list(dict.fromkeys((min(m, 8192), min(n, 32), min(k, 128)) for m, n, k in shapes))


def numbers(text: str, name: str = "M") -> list[int]:
    """The sizes that a list such as ``1,16`` or ``64-256:64`` or ``1-64*2`` stands for.

    Args:
        text: comma-separated; ``a-b:s`` steps by s, ``a-b*f`` multiplies by f, up to and with b.
        name: of the option, for the message.

    Raises:
        ValueError: it cannot be read, or a size is not positive.
    """
    found: list[int] = []
    try:
        for part in text.split(","):
            low, dash, rest = part.partition("-")
            if not dash:
                found.append(int(part))
                continue
            sign = "*" if "*" in rest else ":"
            high, _, step = rest.partition(sign)
            size, last, by = int(low), int(high), int(step)
            if size < 1 or by < (2 if sign == "*" else 1):
                raise ValueError
            while size <= last:
                found.append(size)
                size = size * by if sign == "*" else size + by
    except ValueError:
        found = []
    if not found or min(found) < 1:
        raise ValueError(f"-{name}: got {text!r}, must be like 16,64 or 64-512:64 or 1-64*2")
    return found


def shapes_of(sets: Sequence[str], m: str | None, n: str | None, k: str | None) -> list[Shape]:
    """All shapes that the command line names, those of one weight together, without repeats.

    Sizes without sets are multiplied out; with sets, ``-M`` replaces the sets' own M.

    Raises:
        ValueError: an unknown set, or sizes that are too few or cannot be read.
    """
    for name in sets:
        if name not in SETS:
            raise ValueError(f"set: got {name!r}, must be one of {', '.join(SETS)}")
    found = [shape for name in sets for shape in SETS[name]]
    if n is not None or k is not None or not sets:
        if m is None or n is None or k is None:
            raise ValueError("got no whole shape, must be a named set, or all of -M, -N and -K")
        sizes = (numbers(text, name) for text, name in ((m, "M"), (n, "N"), (k, "K")))
        ms, ns, ks = sizes
        found += [(i, j, length) for j in ns for length in ks for i in ms]
    elif m is not None:
        found = [(i, n_, k_) for _, n_, k_ in found for i in numbers(m)]
    for _, n_, k_ in found:
        if n_ % 8 or k_ % 16:
            raise ValueError(f"got N={n_}, K={k_}, must be multiples of 8 and 16")
    weights = {weight: i for i, weight in enumerate(dict.fromkeys(s[1:] for s in found))}
    return sorted(dict.fromkeys(found), key=lambda shape: weights[shape[1:]])


def names_of(sets: Sequence[str]) -> str:
    """What a result file of these sets is called."""
    return "-".join(sets) if sets else "shapes"
