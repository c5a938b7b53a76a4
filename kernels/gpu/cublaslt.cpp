// FP8 gemms of cuBLASLt in one call per gemm: what cublaslt.py does, without Python between the library's functions. That
// file has the formula and what the words mean; cublaslt_compiled.py compiles this one and gives it the numbers of the
// library's ABI as macros. No CUDA headers and no torch headers: the library is open already, and is asked for its functions.
#include <dlfcn.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <list>
#include <mutex>
#include <string>
#include <unordered_map>

namespace {

using Object = void*;
struct Refused {};  // by the library; `refusal` says why

thread_local std::string refusal;

// Everything about a gemm but its addresses: numbers alone, without gaps, so that the bytes can be hashed and compared.
// Strides are those of the dimension that is not contiguous.
struct Key {
    int64_t m, n, k, left_stride, right_stride, c_stride, d_stride;
    int32_t left_type, right_type, c_type, d_type, bias_type;  // bias_type: -1 without a bias
    int32_t left_by_k, right_by_k, fast_accumulation;
    int32_t alignment[5];  // of right, left, c, d and the bias
    int32_t scale_mode, on_device, nothing;  // on_device: alpha and beta
    bool operator==(const Key& other) const { return !std::memcmp(this, &other, sizeof(Key)); }
};
static_assert(sizeof(Key) == 7 * 8 + 16 * 4, "a gap would be compared too");

struct Hash {
    size_t operator()(const Key& key) const {
        uint64_t words[sizeof(Key) / 8], mixed = 0;
        std::memcpy(words, &key, sizeof(Key));
        for (uint64_t word : words) mixed = (mixed ^ word) * 0x9e3779b97f4a7c15u, mixed ^= mixed >> 29;
        return mixed;
    }
};

struct HeuristicResult {
    uint64_t algo[8];
    size_t workspace_size;
    int state;
    float waves_count;
    int reserved[4];
};

struct Plan {
    Key key;
    Object description = nullptr, layouts[4] = {};  // of A, B, C and D
    HeuristicResult chosen = {};
    bool has_kernel = false;
    std::string refused;  // by the library, where it is not empty
};

int32_t alignment_of(const void* address) {
    const auto bits = reinterpret_cast<uintptr_t>(address);
    return bits ? static_cast<int32_t>(std::min<uintptr_t>(bits & -bits, MOST_ALIGNMENT)) : MOST_ALIGNMENT;
}

// One handle of the library. Threads wait for each other: a description is filled in, then used.
class CublasLt {
  public:
    CublasLt(void* library, size_t most_plans) : library_(library), most_plans_(most_plans) {
        find(create_, "cublasLtCreate");
        find(matmul_, "cublasLtMatmul");
        find(heuristic_, "cublasLtMatmulAlgoGetHeuristic");
        find(create_description_, "cublasLtMatmulDescCreate");
        find(destroy_description_, "cublasLtMatmulDescDestroy");
        find(describe_, "cublasLtMatmulDescSetAttribute");
        find(create_layout_, "cublasLtMatrixLayoutCreate");
        find(destroy_layout_, "cublasLtMatrixLayoutDestroy");
        find(create_preference_, "cublasLtMatmulPreferenceCreate");
        find(destroy_preference_, "cublasLtMatmulPreferenceDestroy");
        find(prefer_, "cublasLtMatmulPreferenceSetAttribute");
        check("cublasLtCreate", create_(&handle_));
    }

    // The plan for a gemm, made once. Where sizes vary from step to step, no more than most_plans_ are kept.
    Plan& plan(const Key& key, const void* const* vectors) {
        if (const auto known = known_.find(key); known != known_.end()) {
            plans_.splice(plans_.end(), plans_, known->second);  // by last use
        } else {
            plans_.emplace_back();
            plans_.back().key = key;
            known_.emplace(key, std::prev(plans_.end()));
            try {
                fill(plans_.back(), vectors);
            } catch (const Refused&) {  // asking again would take as long, each time
                plans_.back().refused = refusal;
                give_back(plans_.back());
            }
            if (!plans_.back().has_kernel) give_back(plans_.back());
            if (plans_.size() > most_plans_) {
                give_back(plans_.front());
                known_.erase(plans_.front().key);
                plans_.pop_front();
            }
        }
        return plans_.back();
    }

    void point_to(Object description, const void* const* vectors) {
        constexpr int attributes[3] = {DESC_A_SCALE_POINTER, DESC_B_SCALE_POINTER, DESC_BIAS_POINTER};
        for (int i = 0; i < 3; ++i)
            if (vectors[i]) describe(description, attributes[i], vectors[i]);
    }

    // alpha, beta: in the GPU's memory, or null.
    void multiply(const Plan& plan, const void* left, const void* right, const void* alpha, const void* beta, const void* c,
                  void* d, void* workspace, int64_t workspace_bytes, void* stream) {
        const float one = 1, beta_here = c ? 1 : 0;
        if (!alpha) alpha = &one, beta = &beta_here;
        check("cublasLtMatmul",
              matmul_(handle_, plan.description, alpha, right, plan.layouts[0], left, plan.layouts[1], beta, c ? c : d,
                      plan.layouts[2], d, plan.layouts[3], plan.chosen.algo, workspace, workspace_bytes, stream));
    }

    std::mutex lock;

  private:
    template <typename Function>
    void find(Function*& function, const char* name) {
        function = reinterpret_cast<Function*>(dlsym(library_, name));
        if (!function) {
            refusal = std::string(name) + " is not in the library";
            throw Refused();
        }
    }

    void check(const char* name, int status) {
        if (status) {
            refusal = std::string(name) + " failed with status " + std::to_string(status) + " (cublasStatus_t)";
            throw Refused();
        }
    }

    template <typename Setting>
    void describe(Object description, int attribute, Setting setting) {
        check("cublasLtMatmulDescSetAttribute", describe_(description, attribute, &setting, sizeof(setting)));
    }

    void fill(Plan& plan, const void* const* vectors) {
        const Key& key = plan.key;
        check("cublasLtMatmulDescCreate", create_description_(&plan.description, COMPUTE_32F, TYPE_32F));
        describe<int32_t>(plan.description, DESC_TRANSA, key.right_by_k ? OP_T : OP_N);
        describe<int32_t>(plan.description, DESC_TRANSB, key.left_by_k ? OP_N : OP_T);
        describe<int8_t>(plan.description, DESC_FAST_ACCUM, key.fast_accumulation != 0);
        if (key.on_device) describe<int32_t>(plan.description, DESC_POINTER_MODE, POINTERS_ON_DEVICE);
        if (key.scale_mode) {
            describe<int32_t>(plan.description, DESC_A_SCALE_MODE, key.scale_mode);
            describe<int32_t>(plan.description, DESC_B_SCALE_MODE, key.scale_mode);
        }
        if (key.bias_type >= 0) {
            describe<int32_t>(plan.description, DESC_EPILOGUE, EPILOGUE_BIAS);
            describe<int32_t>(plan.description, DESC_BIAS_DATA_TYPE, key.bias_type);
        }
        point_to(plan.description, vectors);
        // A matrix [R, C] that is stored row by row is one of C rows and R columns to cuBLASLt.
        const int64_t m = key.m, n = key.n, k = key.k;
        lay_out(plan.layouts[0], key.right_type, key.right_by_k ? k : n, key.right_by_k ? n : k, key.right_stride);
        lay_out(plan.layouts[1], key.left_type, key.left_by_k ? k : m, key.left_by_k ? m : k, key.left_stride);
        lay_out(plan.layouts[2], key.c_type, n, m, key.c_stride);
        lay_out(plan.layouts[3], key.d_type, n, m, key.d_stride);
        choose(plan);
    }

    void lay_out(Object& layout, int type, uint64_t rows, uint64_t cols, int64_t stride) {
        check("cublasLtMatrixLayoutCreate", create_layout_(&layout, type, rows, cols, stride));
    }

    // The algorithm that the library thinks best.
    void choose(Plan& plan) {
        Object preference = nullptr;
        int found = 0;
        check("cublasLtMatmulPreferenceCreate", create_preference_(&preference));
        try {
            prefer<uint64_t>(preference, PREF_MAX_WORKSPACE_BYTES, WORKSPACE_BYTES);
            for (int i = 0; i < 4; ++i) prefer<uint32_t>(preference, PREF_MIN_ALIGNMENT + i, plan.key.alignment[i]);
            const Object* layouts = plan.layouts;
            check("cublasLtMatmulAlgoGetHeuristic",
                  heuristic_(handle_, plan.description, layouts[0], layouts[1], layouts[2], layouts[3], preference, 1,
                             &plan.chosen, &found));
        } catch (const Refused&) {
            destroy_preference_(preference);
            throw;
        }
        destroy_preference_(preference);
        plan.has_kernel = found && !plan.chosen.state;
    }

    template <typename Limit>
    void prefer(Object preference, int attribute, Limit limit) {
        check("cublasLtMatmulPreferenceSetAttribute", prefer_(preference, attribute, &limit, sizeof(limit)));
    }

    void give_back(Plan& plan) {
        for (Object& layout : plan.layouts)
            if (layout) destroy_layout_(layout), layout = nullptr;
        if (plan.description) destroy_description_(plan.description), plan.description = nullptr;
    }

    void* library_;
    size_t most_plans_;
    Object handle_ = nullptr;
    std::list<Plan> plans_;
    std::unordered_map<Key, std::list<Plan>::iterator, Hash> known_;

    int (*create_)(Object*);
    int (*matmul_)(Object, Object, const void*, const void*, Object, const void*, Object, const void*, const void*, Object,
                   void*, Object, const void*, void*, size_t, void*);
    int (*heuristic_)(Object, Object, Object, Object, Object, Object, Object, int, HeuristicResult*, int*);
    int (*create_description_)(Object*, int, int);
    int (*destroy_description_)(Object);
    int (*describe_)(Object, int, const void*, size_t);
    int (*create_layout_)(Object*, int, uint64_t, uint64_t, int64_t);
    int (*destroy_layout_)(Object);
    int (*create_preference_)(Object*);
    int (*destroy_preference_)(Object);
    int (*prefer_)(Object, int, const void*, size_t);
};

}  // namespace

extern "C" {

// A handle, or null; `library` is what dlopen gave.
void* fp8_cublaslt_open(void* library, int64_t most_plans) {
    try {
        return new CublasLt(library, static_cast<size_t>(most_plans));
    } catch (const Refused&) {
        return nullptr;
    }
}

// Why the last call of this thread was refused.
const char* fp8_cublaslt_refusal() { return refusal.c_str(); }

// left: [m, k], right: [k, n] with both strides; c, d: [m, n] with the stride of their rows, c may be null; types as
// cuBLASLt numbers them, sizes and strides in elements of these types; scale_mode: as cuBLASLt numbers it; alpha, beta: null,
// or where the GPU finds them. Returns 0 once the gemm is launched; REFUSED; NO_KERNEL; or, where the gemm needs a larger workspace, how many bytes: nothing was launched then.
int64_t fp8_cublaslt_multiply(void* handle, int64_t m, int64_t n, int64_t k,
                              const void* left, int64_t left_stride, int64_t left_k_stride, int left_type,
                              const void* right, int64_t right_k_stride, int64_t right_stride, int right_type,
                              const void* scale_left, const void* scale_right, const void* bias, int bias_type,
                              const void* c, int64_t c_stride, int c_type, void* d, int64_t d_stride, int d_type,
                              int fast_accumulation, int scale_mode, const void* alpha, const void* beta, void* workspace,
                              int64_t workspace_bytes, void* stream) {
    auto& library = *static_cast<CublasLt*>(handle);
    const bool left_by_k = left_k_stride == 1, right_by_k = right_k_stride == 1;
    const Key key = {m, n, k, left_by_k ? left_stride : left_k_stride, right_by_k ? right_stride : right_k_stride,
                     c ? c_stride : d_stride, d_stride, left_type, right_type, c ? c_type : d_type, d_type,
                     bias ? bias_type : -1, left_by_k, right_by_k, fast_accumulation,
                     {alignment_of(right), alignment_of(left), alignment_of(c ? c : d), alignment_of(d),
                      bias ? alignment_of(bias) : 0}, scale_mode, alpha != nullptr, 0};
    const void* vectors[3] = {scale_right, scale_left, bias};  // of A, of B
    const std::lock_guard<std::mutex> waits(library.lock);
    try {
        const Plan& plan = library.plan(key, vectors);
        if (!plan.refused.empty()) {
            refusal = plan.refused;
            return REFUSED;
        }
        if (!plan.has_kernel) return NO_KERNEL;
        if (plan.chosen.workspace_size > static_cast<size_t>(workspace_bytes))
            return static_cast<int64_t>(plan.chosen.workspace_size);
        library.point_to(plan.description, vectors);
        library.multiply(plan, left, right, alpha, beta, c, d, workspace, workspace_bytes, stream);
        return 0;
    } catch (const Refused&) {
        return REFUSED;
    }
}

}  // extern "C"
