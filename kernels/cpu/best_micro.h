// The best `Micro` that this library is compiled for: for bf16 panels where there is one, and for FP32 panels.
#pragma once

#include "micro_fp32.h"

#if defined(FP8_EMULATE_AMX) || defined(__AMX_BF16__)
#include "micro_amx.h"
#define HAS_BF16_MICRO 1
using Bf16Micro = fp8::MicroAmx;
#elif defined(__AVX512BF16__)
#include "micro_bf16.h"
#define HAS_BF16_MICRO 1
using Bf16Micro = fp8::MicroBf16;
#endif
