"""llama.cpp as a process that answers one line of JSON after the other: what ``serve_cpu.py`` compares with.

    python benchmarks/llama_cpp_peer.py MODEL.gguf --sequences 16 --context 4096     the wheel xllamacpp
    python benchmarks/llama_cpp_peer.py --requantize IN.gguf OUT.gguf                NVFP4 -> Q4_K, the head Q6_K

A request is {"prompt": number of tokens, "tokens": ..., "sequences": ...}; the answer has the time that it took.
Sequences of one request share the prompt's computation and are decoded together.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import json
import pathlib
import random
import sys
import time

Q4_K, Q6_K = 12, 14
UBATCH = 512


def serve(model: str, sequences: int, context: int, threads: int) -> None:
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path, params.n_ctx, params.n_parallel = model, sequences * (context + 128), sequences
    params.n_batch, params.n_ubatch, params.warmup, params.verbosity = 2048, UBATCH, True, 0
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    server = xllamacpp.Server(params)
    reply({"ready": True})
    for line in sys.stdin:
        asked = json.loads(line)
        rng = random.Random(asked.get("seed", 0))
        prompt = [rng.randrange(10, 300) for _ in range(asked["prompt"])]
        given = {"prompt": prompt, "max_tokens": asked["tokens"], "temperature": 0, "ignore_eos": True}
        given |= {"cache_prompt": asked.get("cached", True), "n": asked["sequences"]}
        started, busy = time.perf_counter(), time.process_time()
        server.handle_completions(given)
        reply({"wall": time.perf_counter() - started, "cpu": time.process_time() - busy, "memory": memory()})


def requantize(source: pathlib.Path, target: pathlib.Path) -> None:
    """Write a GGUF file whose NVFP4 matrices are Q4_K and whose head is Q6_K, by llama.cpp's own quantizers."""
    import gguf
    import numpy as np
    import xllamacpp

    library = ctypes.CDLL(str(pathlib.Path(xllamacpp.__file__).parent / "xllamacpp.abi3.so"))
    size, pointer = ctypes.c_int64, ctypes.c_void_p
    library.ggml_quantize_chunk.argtypes = (ctypes.c_int, pointer, pointer, size, size, size, pointer)
    library.ggml_quantize_chunk.restype = ctypes.c_size_t
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name not in ("general.architecture", "general.file_type"):
            kind = field.types[0]
            part = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(name, field.contents(), kind, part)
    tensors = {one.name: one for one in reader.tensors}
    known: dict[tuple[bytes, float], np.ndarray] = {}  # the model's blocks are alike
    for name, one in tensors.items():
        nvfp4 = one.tensor_type == gguf.GGMLQuantizationType.NVFP4
        if name.endswith(".scale"):
            continue
        if not nvfp4 and name != "output.weight":
            writer.add_tensor(name, np.array(one.data))
            continue
        scale = tensors[f"{name.removesuffix('.weight')}.scale"].data[0] if nvfp4 else 1.0
        number = Q4_K if nvfp4 else Q6_K
        key = hashlib.sha256(one.data).digest(), float(scale)
        if key not in known:
            wide = np.ascontiguousarray(gguf.quants.dequantize(one.data, one.tensor_type).astype(np.float32) * scale)
            out = np.empty((wide.shape[0], wide.shape[1] // 256 * {Q4_K: 144, Q6_K: 210}[number]), dtype=np.uint8)
            library.ggml_quantize_chunk(number, wide.ctypes.data, out.ctypes.data, 0, *wide.shape, None)
            known[key] = out
        writer.add_tensor(name, known[key], raw_dtype=gguf.GGMLQuantizationType(number))
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_K_S)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def memory() -> int:
    """Resident bytes of this process at their highest."""
    text = pathlib.Path("/proc/self/status").read_text()
    return int(text.partition("VmHWM:")[2].split()[0]) * 1024


def reply(answer: object) -> None:
    print(f"ANSWER {json.dumps(answer)}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("files", nargs="+")
    parser.add_argument("--requantize", action="store_true")
    parser.add_argument("--sequences", type=int, default=1)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--threads", type=int, default=2)
    chosen = parser.parse_args()
    if chosen.requantize:
        requantize(*map(pathlib.Path, chosen.files))
    else:
        serve(chosen.files[0], chosen.sequences, chosen.context, chosen.threads)
