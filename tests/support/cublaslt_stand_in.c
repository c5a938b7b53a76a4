/* A libcublasLt for machines without a GPU: the functions that fp8_compile calls, on host memory, in double precision.
 *
 * It knows scales per 32 and per 16 values too, swizzled, and alpha and beta in "the GPU's memory", as NVFP4 has them.
 * It holds callers to what cuBLAS's manual asks of FP8 gemms: both operands with K contiguous unless any_layout is set, as
 * on compute capability 10, sizes that are multiples of 16, addresses and leading dimensions of 16 bytes, not E5M2 by E5M2, C and D of one type, FP32
 * sums, attributes of the right size. Anything else is CUBLAS_STATUS_NOT_SUPPORTED or CUBLAS_STATUS_INVALID_VALUE.
 * Descriptions are checked again when a product is computed, as the real library does. */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { SUCCESS = 0, INVALID_VALUE = 7, NOT_SUPPORTED = 15 };
enum { R_32F = 0, R_16F = 2, R_16BF = 14, E4M3 = 28, E5M2 = 29, E2M1 = 33 };
enum { VEC16 = 1, VEC32 = 2 };
enum { LARGEST_ATTRIBUTE = 42 };
int any_layout = 1;
int objects = 0;  /* that the caller has not given back */
int asked = 0;    /* how often for an algorithm */
int needed = 0;   /* bytes of workspace that algorithms need from now on */
int knows_any = 1; /* algorithm; 0: asked for one, it finds none */
int computes = 1; /* 0: a product takes no time, and its result is not written */
float factor = 1; /* of every product: anything but 1 is a library that computes wrongly */
static const uint64_t MARK = 0x5ca1ed;

typedef struct { int compute, scale_type; int64_t attributes[LARGEST_ATTRIBUTE]; } Description;
typedef struct { int type; uint64_t rows, cols; int64_t ld; } Layout;
typedef struct { uint64_t workspace; uint32_t alignment[4]; } Preference;
typedef struct { uint64_t algo[8]; size_t workspace; int state; float waves; int reserved[4]; } Result;

static int size_of(int type) { return type == R_32F ? 4 : type == E4M3 || type == E5M2 || type == E2M1 ? 1 : 2; }

static float decode(const void* base, int type, int64_t i) {
    if (type == R_32F) return ((const float*)base)[i];
    if (type == R_16BF) {
        uint32_t bits = (uint32_t)((const uint16_t*)base)[i] << 16;
        float x;
        memcpy(&x, &bits, 4);
        return x;
    }
    if (type == R_16F) return (float)((const _Float16*)base)[i];
    if (type == E2M1) {
        static const float values[8] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
        const int code = ((const uint8_t*)base)[i / 2] >> (i % 2 * 4) & 15;
        return code & 8 ? -values[code & 7] : values[code & 7];
    }
    const int byte = ((const uint8_t*)base)[i], mantissa_bits = type == E4M3 ? 3 : 2, bias = type == E4M3 ? 7 : 15;
    const int exponent = (byte & 127) >> mantissa_bits, mantissa = byte & ((1 << mantissa_bits) - 1);
    const float sign = byte & 128 ? -1 : 1;
    if (type == E4M3 && (byte & 127) == 127) return NAN;
    if (type == E5M2 && exponent == 31) return mantissa ? NAN : sign * INFINITY;
    const int whole = exponent ? mantissa + (1 << mantissa_bits) : mantissa;
    return sign * ldexpf((float)whole, (exponent ? exponent : 1) - bias - mantissa_bits);
}

static void encode(void* base, int type, int64_t i, double x) {
    if (type == R_32F) ((float*)base)[i] = (float)x;
    else if (type == R_16F) ((_Float16*)base)[i] = (_Float16)x;
    else {
        float narrow = (float)x;
        uint32_t bits;
        memcpy(&bits, &narrow, 4);
        ((uint16_t*)base)[i] = isnan(narrow) ? 0x7fc0 : (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
    }
}

int cublasLtCreate(void** handle) { *handle = malloc(1); return SUCCESS; }

int cublasLtMatmulDescCreate(void** made, int compute, int scale_type) {
    Description* description = calloc(1, sizeof(Description));
    description->compute = compute;
    description->scale_type = scale_type;
    *made = description;
    ++objects;
    return SUCCESS;
}

int cublasLtMatmulDescSetAttribute(void* of, int name, const void* value, size_t size) {
    size_t expected;
    switch (name) {
        case 2: case 31: case 32: expected = 4; break;                  /* POINTER_MODE, A_ and B_SCALE_MODE */
        case 3: case 4: case 7: case 26: expected = 4; break;           /* TRANSA, TRANSB, EPILOGUE, BIAS_DATA_TYPE */
        case 8: case 17: case 18: expected = sizeof(void*); break;      /* BIAS_POINTER, A_ and B_SCALE_POINTER */
        case 25: expected = 1; break;                                   /* FAST_ACCUM */
        default: return INVALID_VALUE;
    }
    if (size != expected) return INVALID_VALUE;
    int64_t* attribute = &((Description*)of)->attributes[name];
    *attribute = 0;
    memcpy(attribute, value, size);
    return SUCCESS;
}

int cublasLtMatrixLayoutCreate(void** made, int type, uint64_t rows, uint64_t cols, int64_t ld) {
    Layout* layout = malloc(sizeof(Layout));
    *layout = (Layout){type, rows, cols, ld};
    *made = layout;
    ++objects;
    return SUCCESS;
}

static int given_back(void* object) { free(object); --objects; return SUCCESS; }
int cublasLtMatmulDescDestroy(void* description) { return given_back(description); }
int cublasLtMatrixLayoutDestroy(void* layout) { return given_back(layout); }

int cublasLtMatmulPreferenceCreate(void** made) { *made = calloc(1, sizeof(Preference)); ++objects; return SUCCESS; }
int cublasLtMatmulPreferenceDestroy(void* preference) { return given_back(preference); }

int cublasLtMatmulPreferenceSetAttribute(void* of, int name, const void* value, size_t size) {
    Preference* preference = of;
    if (name == 1 && size == 8) memcpy(&preference->workspace, value, 8);
    else if (name >= 5 && name <= 8 && size == 4) memcpy(&preference->alignment[name - 5], value, 4);
    else return INVALID_VALUE;
    return SUCCESS;
}

static int supported(const Description* d, const Layout* a, const Layout* b, const Layout* c, const Layout* y) {
    const int fp8 = (a->type == E4M3 || a->type == E5M2) && (b->type == E4M3 || b->type == E5M2);
    const int mode = (int)d->attributes[31], fp4 = a->type == E2M1 && b->type == E2M1;
    if (mode != (int)d->attributes[32] || fp4 != (mode == VEC16) || (mode == VEC32 && (a->type != E4M3 || b->type != E4M3)))
        return 0;
    if (d->compute != 68 || d->scale_type != R_32F || !(fp8 || fp4) || (a->type == E5M2 && b->type == E5M2)) return 0;
    const int ta = d->attributes[3] == 1, tb = d->attributes[4] == 1;
    if ((!any_layout || fp4) && (!ta || tb)) return 0;
    if (!d->attributes[17] || !d->attributes[18]) return 0;
    if (d->attributes[7] && (d->attributes[7] != 4 || !d->attributes[8] || size_of(d->attributes[26]) != 2)) return 0;
    const uint64_t m = ta ? a->cols : a->rows, k = ta ? a->rows : a->cols, n = tb ? b->rows : b->cols;
    if (k != (tb ? b->cols : b->rows) || m != c->rows || n != c->cols || c->type != y->type) return 0;
    if (c->rows != y->rows || c->cols != y->cols || k % (mode ? 32 : 16) || m % 16) return 0;
    const Layout* all[4] = {a, b, c, y};
    for (int i = 0; i < 4; ++i)
        if (all[i]->ld < (int64_t)all[i]->rows || all[i]->ld * size_of(all[i]->type) % (all[i]->type == E2M1 ? 32 : 16))
            return 0;
    return 1;
}

int cublasLtMatmulAlgoGetHeuristic(void* handle, void* d, void* a, void* b, void* c, void* y, void* preference,
                                   int wanted, Result* result, int* found) {
    *found = 0;
    ++asked;
    if (!handle || wanted != 1) return INVALID_VALUE;
    for (int i = 0; i < 4; ++i)
        if (((Preference*)preference)->alignment[i] < 16) return NOT_SUPPORTED;
    if (!supported(d, a, b, c, y)) return NOT_SUPPORTED;
    memset(result, 0, sizeof(Result));
    result->algo[0] = MARK;
    result->algo[1] = result->workspace = needed;
    *found = knows_any;
    return SUCCESS;
}

/* The scale of row r at k, in the order of the hardware. */
static double block_scale(const Description* d, int which, uint64_t r, uint64_t k, uint64_t depth) {
    const int mode = (int)d->attributes[31], size = mode == VEC16 ? 16 : 32;
    if (!mode) return 1;
    const uint64_t c = k / size, columns = (depth / size + 3) / 4;
    const uint8_t* at = (const uint8_t*)d->attributes[which] + (r / 128 * columns + c / 4) * 512 + r % 32 * 16 +
                        r % 128 / 32 * 4 + c % 4;
    return mode == VEC32 ? (*at == 255 ? NAN : ldexp(1, *at - 127)) : decode(at, E4M3, 0);
}

int cublasLtMatmul(void* handle, void* description, const float* alpha, const void* a, const Layout* la, const void* b,
                   const Layout* lb, const float* beta, const void* c, const Layout* lc, void* y, const Layout* ly,
                   const uint64_t* algo, void* workspace, size_t workspace_size, void* stream) {
    const Description* d = description;
    if (!handle || algo[0] != MARK || stream || !workspace || workspace_size < algo[1]) return INVALID_VALUE;
    if (((uintptr_t)a | (uintptr_t)b | (uintptr_t)c | (uintptr_t)y) % 16) return NOT_SUPPORTED;
    if (!supported(d, la, lb, lc, ly)) return NOT_SUPPORTED;
    if (!computes) return SUCCESS;
    memset(workspace, 0xff, algo[1]);
    const int ta = d->attributes[3] == 1, tb = d->attributes[4] == 1;
    const uint64_t depth = ta ? la->rows : la->cols;
    const double scales = d->attributes[31] ? 1 : (double)*(const float*)d->attributes[17] * *(const float*)d->attributes[18];
    const double scale = scales * *alpha * factor;
    for (uint64_t j = 0; j < lc->cols; ++j)
        for (uint64_t i = 0; i < lc->rows; ++i) {
            double sum = 0;
            for (uint64_t k = 0; k < depth; ++k)
                sum += (double)decode(a, la->type, ta ? i * la->ld + k : k * la->ld + i) *
                       decode(b, lb->type, tb ? k * lb->ld + j : j * lb->ld + k) * block_scale(d, 17, i, k, depth) *
                       block_scale(d, 18, j, k, depth);
            sum = sum * scale + (*beta ? *beta * decode(c, lc->type, j * lc->ld + i) : 0);
            if (d->attributes[7]) sum += decode((const void*)d->attributes[8], (int)d->attributes[26], i);
            encode(y, ly->type, j * ly->ld + i, sum);
        }
    return SUCCESS;
}
