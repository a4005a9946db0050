"""Bytes and nanoseconds per entry of the wire format, against raw (int32 index, fp32 value) pairs."""

from __future__ import annotations

import numpy as np
import torch
from common import arguments, report, side_by_side

from oktopk.wire.message import Tag, ValueCode, best_index_code, decode, encode
from oktopk.wire.sparse_vector import SparseVector

HEADERS = [
    "entries",
    "density",
    "indices",
    "values",
    "code",
    "bytes/entry",
    "raw / it",
    "encode ns",
    "decode ns",
    "sum",
]


def measure(count: int, density: float, repeats: int) -> tuple[list[list[object]], list[dict]]:
    span = int(count / density)
    positions = np.sort(np.random.default_rng(0).choice(span, count, replace=False)).astype(np.int32)
    vector = SparseVector(torch.from_numpy(positions), torch.randn(count) * torch.randn(count).exp(), span)
    tag = Tag(step=0, bucket=0, phase=0, sender=0, size=span, start=0, span=span)
    variants = [("raw", ValueCode.FP32), *(("coded", code) for code in ValueCode)]
    messages, runs = {}, {}
    for indices, values in variants:
        raw = indices == "raw"
        message, _ = encode(vector, tag, values, raw_indices=raw)
        messages[indices, values] = message
        runs["encode", indices, values] = lambda v=values, r=raw: encode(vector, tag, v, raw_indices=r)
        runs["decode", indices, values] = lambda m=message: decode(m, tag)
    times = side_by_side(runs, repeats)
    rows: list[list[object]] = []
    records = []
    raw_bytes = messages["raw", ValueCode.FP32].numel()
    for indices, values in variants:
        size = messages[indices, values].numel()
        encoding, decoding = (1e9 * times[what, indices, values] / count for what in ("encode", "decode"))
        code, _, low = best_index_code(positions, 0, span, indices == "raw")
        label = f"{code.name.lower()}/{low}" if low else code.name.lower()
        rows.append([f"{count:,}", f"{density:g}", indices, values.name.lower(), label, f"{size / count:.3f}",
                     f"{raw_bytes / size:.2f}x", f"{encoding:.2f}", f"{decoding:.2f}",
                     f"{encoding + decoding:.2f}"])  # fmt: skip
        records.append({"entries": count, "density": density, "indices": indices, "values": values.name,
                        "code": label, "bytes_per_entry": size / count, "encode_ns": encoding,
                        "decode_ns": decoding})  # fmt: skip
    return rows, records


def main() -> None:
    parser = arguments(__doc__.splitlines()[0], "wire")
    parser.add_argument("--repeats", type=int, default=200)
    options = parser.parse_args()
    torch.set_num_threads(1)
    cases = [(count, density) for density in (0.1, 0.01, 0.001) for count in (10_000, 100_000, 250_000)]
    measured = (measure(count, density, options.repeats) for count, density in cases)
    report(HEADERS, measured, options.json)


if __name__ == "__main__":
    main()
