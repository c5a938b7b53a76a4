// The operations as torch's dispatcher calls them, by its stable C interface: a call costs about 3 microseconds, and the
// file compiles in a second.
//
// Python has defined the operations (define_op.py); these are their implementations for the CPU. A boxed function finds
// its arguments on a stack, owns them, and leaves its results there. What an operation has no kernel for goes to
// fp8_compile::<name>_formula, which Python defines too.
#include <dlfcn.h>

#include <cstring>
#include <tuple>

#include "operations.h"

namespace fp8 {

namespace {

Kernels chosen{};

// An argument on the stack, by the type that an operation takes it as. It is freed at the end, unless it is released.
template <class T> class Argument;

template <> class Argument<const Tensor&> {
 public:
  explicit Argument(StableIValue value) : owned_(reinterpret_cast<AtenTensorHandle>(value)), tensor_(owned_.get()) {}
  const Tensor& get() const { return tensor_; }
  void release() { owned_.give(); }

 private:
  Owned owned_;
  Tensor tensor_;
};

// A number: the first bytes of the value.
template <class T> class Number {
 public:
  explicit Number(StableIValue value) { std::memcpy(&number_, &value, sizeof number_); }
  T get() const { return number_; }
  void release() {}

 private:
  T number_;
};
template <> struct Argument<int32_t> : Number<int32_t> { using Number::Number; };
template <> struct Argument<int64_t> : Number<int64_t> { using Number::Number; };
template <> struct Argument<double> : Number<double> { using Number::Number; };
template <> struct Argument<bool> : Number<bool> { using Number::Number; };

template <> class Argument<const std::string&> {
 public:
  explicit Argument(StableIValue value) : handle_(reinterpret_cast<StringHandle>(value)) {
    const char* text = nullptr;
    size_t length = 0;
    succeed(torch_string_c_str(handle_, &text));
    succeed(torch_string_length(handle_, &length));
    text_.assign(text, length);
  }
  Argument(const Argument&) = delete;
  ~Argument() {
    if (handle_) torch_delete_string(handle_);
  }
  const std::string& get() const { return text_; }
  void release() { handle_ = nullptr; }

 private:
  StringHandle handle_;
  std::string text_;
};

// One that may be missing is a pointer to a value, or null.
template <class T> class Argument<const std::optional<T>&> {
 public:
  explicit Argument(StableIValue value) : pointer_(reinterpret_cast<StableIValue*>(value)) {
    if (!pointer_) return;
    inner_.emplace(*pointer_);
    got_.emplace(inner_->get());
  }
  Argument(const Argument&) = delete;
  ~Argument() {
    if (pointer_) torch_delete_stable_ivalue(pointer_);
  }
  const std::optional<T>& get() const { return got_; }
  void release() {
    pointer_ = nullptr;
    if (inner_) inner_->release();
  }

 private:
  StableIValue* pointer_;
  std::optional<Argument<const T&>> inner_;
  std::optional<T> got_;
};

class List {
 public:
  explicit List(StableIValue value) : handle_(reinterpret_cast<StableListHandle>(value)) { succeed(torch_list_size(handle_, &size_)); }
  List(const List&) = delete;
  ~List() {
    if (handle_) torch_delete_list(handle_);
  }
  void release() { handle_ = nullptr; }
  size_t size() const { return size_; }
  StableIValue item(size_t index) const {
    StableIValue value = 0;
    succeed(torch_list_get_item(handle_, index, &value));
    return value;
  }

 private:
  StableListHandle handle_;
  size_t size_ = 0;
};
template <> class Argument<const std::vector<int64_t>&> {
 public:
  explicit Argument(StableIValue value) : list_(value) {
    for (size_t i = 0; i < list_.size(); ++i) values_.push_back(static_cast<int64_t>(list_.item(i)));
  }
  const std::vector<int64_t>& get() const { return values_; }
  void release() { list_.release(); }

 private:
  List list_;
  std::vector<int64_t> values_;
};
template <> class Argument<const std::vector<Tensor>&> {
 public:
  explicit Argument(StableIValue value) {
    const List list(value);
    owned_.reserve(list.size());
    for (size_t i = 0; i < list.size(); ++i) owned_.emplace_back(reinterpret_cast<AtenTensorHandle>(list.item(i)));
    for (const Owned& one : owned_) tensors_.emplace_back(one.get());
  }
  const std::vector<Tensor>& get() const { return tensors_; }

 private:
  std::vector<Owned> owned_;
  std::vector<Tensor> tensors_;
};

StableIValue given_away(Owned& tensor) { return reinterpret_cast<StableIValue>(tensor.give()); }
void put(Owned result, StableIValue* stack) { stack[0] = given_away(result); }
void put(Two result, StableIValue* stack) { stack[0] = given_away(result.first), stack[1] = given_away(result.second); }
void put(Delayed result, StableIValue* stack) {
  stack[0] = given_away(result.codes), stack[1] = given_away(result.used_scale);
  stack[2] = given_away(result.dequant_scale), stack[3] = given_away(result.amax);
}
void put(WholeScale result, StableIValue* stack) {
  stack[0] = given_away(result.scale), stack[1] = given_away(result.inverse), stack[2] = given_away(result.amax);
}

// `formula`: the operation for what there is no kernel for, if there is such.
template <auto run, const char* formula = nullptr> struct Boxed;
template <class Result, class... Parameters, Result (*run)(Parameters...), const char* formula>
struct Boxed<run, formula> {
  static void function(StableIValue* stack, uint64_t, uint64_t) { call(stack, std::index_sequence_for<Parameters...>()); }

  template <size_t... I> static void call(StableIValue* stack, std::index_sequence<I...>) {
    std::tuple<Argument<Parameters>...> arguments(stack[I]...);
    if constexpr (std::is_void_v<Result>) {
      run(std::get<I>(arguments).get()...);
    } else if constexpr (formula == nullptr) {
      put(run(std::get<I>(arguments).get()...), stack);
    } else {
      try {
        put(run(std::get<I>(arguments).get()...), stack);
        return;
      } catch (const NoKernel&) {
        (std::get<I>(arguments).release(), ...);
      }
      if (torch_call_dispatcher(formula, "", stack, TORCH_ABI_VERSION) != AOTI_TORCH_SUCCESS)
        throw std::runtime_error(torch_exception_get_what_without_backtrace());
    }
  }
};

void record(const Tensor& amaxes, const std::vector<Tensor>& recorded, const std::vector<int64_t>& rows) {
  record_amaxes("record_amaxes_", amaxes, recorded, rows, false);
}
void accumulate(const Tensor& amaxes, const std::vector<Tensor>& recorded, const std::vector<int64_t>& rows) {
  record_amaxes("accumulate_amaxes_", amaxes, recorded, rows, true);
}

constexpr char QUANTIZE[] = "fp8_compile::quantize_formula";
constexpr char QUANTIZE_INPUTS[] = "fp8_compile::quantize_inputs_formula", FP8_MM[] = "fp8_compile::fp8_mm_formula",
               NVFP4_MM[] = "fp8_compile::nvfp4_mm_formula", NVFP4_EXPERTS_MM[] = "fp8_compile::nvfp4_experts_mm_formula",
               FP8_EXPERTS_MM[] = "fp8_compile::fp8_experts_mm_formula";
constexpr char FP8_MM_GRAD[] = "fp8_compile::fp8_mm_grad_formula", NVFP4_MM_GRAD[] = "fp8_compile::nvfp4_mm_grad_formula",
               NVFP4_EXPERTS_MM_GRAD[] = "fp8_compile::nvfp4_experts_mm_grad_formula",
               FP8_EXPERTS_MM_GRAD[] = "fp8_compile::fp8_experts_mm_grad_formula";
constexpr char CACHE_QUANTIZE[] = "fp8_compile::fp8_cache_quantize_formula", CACHE_DEQUANTIZE[] = "fp8_compile::fp8_cache_dequantize_formula";
constexpr char FP8_ATTENTION[] = "fp8_compile::fp8_attention_formula";

struct Implementation {
  const char* name;
  void (*function)(StableIValue*, uint64_t, uint64_t);
};
const Implementation IMPLEMENTATIONS[] = {
    {"scaled_mm", Boxed<&scaled_mm>::function},
    {"scaled_grouped_mm", Boxed<&scaled_grouped_mm>::function},
    {"scales", Boxed<&scales>::function},
    {"cast", Boxed<&cast>::function},
    {"quantize", Boxed<&quantize, QUANTIZE>::function},
    {"quantize_mm", Boxed<&quantize_mm>::function},
    {"quantize_delayed_mm", Boxed<&quantize_delayed_mm>::function},
    {"quantize_delayed", Boxed<&quantize_delayed>::function},
    {"whole_scale", Boxed<&whole_scale>::function},
    {"update_scales_", Boxed<&update_scales>::function},
    {"record_amaxes_", Boxed<&record>::function},
    {"accumulate_amaxes_", Boxed<&accumulate>::function},
    {"quantize_inputs", Boxed<&quantize_inputs, QUANTIZE_INPUTS>::function},
    {"fp8_mm", Boxed<&fp8_mm, FP8_MM>::function},
    {"nvfp4_mm", Boxed<&nvfp4_mm, NVFP4_MM>::function},
    {"nvfp4_experts_mm", Boxed<&nvfp4_experts_mm, NVFP4_EXPERTS_MM>::function},
    {"fp8_experts_mm", Boxed<&fp8_experts_mm, FP8_EXPERTS_MM>::function},
    {"mx_mm", Boxed<&mx_mm>::function},
    {"quantize_mx", Boxed<&quantize_mx>::function},
    {"nvfp4_train_mm", Boxed<&nvfp4_train_mm>::function},
    {"quantize_nvfp4", Boxed<&quantize_nvfp4>::function},
    {"fp8_mm_grad", Boxed<&fp8_mm_grad, FP8_MM_GRAD>::function},
    {"nvfp4_mm_grad", Boxed<&nvfp4_mm_grad, NVFP4_MM_GRAD>::function},
    {"nvfp4_experts_mm_grad", Boxed<&nvfp4_experts_mm_grad, NVFP4_EXPERTS_MM_GRAD>::function},
    {"fp8_cache_quantize", Boxed<&cache_quantize, CACHE_QUANTIZE>::function},
    {"fp8_cache_dequantize", Boxed<&cache_dequantize, CACHE_DEQUANTIZE>::function},
    {"fp8_attention", Boxed<&attention, FP8_ATTENTION>::function},
    {"fp8_experts_mm_grad", Boxed<&fp8_experts_mm_grad, FP8_EXPERTS_MM_GRAD>::function},
};

}  // namespace

const Kernels& kernels() { return chosen; }

}  // namespace fp8

extern "C" {

// The operations call the kernels of that library from now on. The name of a kernel that it does not have, or null.
__attribute__((visibility("default"))) const char* fp8_use_kernels(void* library) {
  fp8::Kernels found{};
#define FP8_FIND(name) \
  if (!(found.name = reinterpret_cast<decltype(found.name)>(dlsym(library, #name)))) return #name;
  FP8_KERNELS(FP8_FIND)
#undef FP8_FIND
  fp8::chosen = found;
  return nullptr;
}

// Once per process: the implementations are torch's until its end. The name of the first that it does not take, or null.
__attribute__((visibility("default"))) const char* fp8_register_operations() {
  TorchLibraryHandle library = nullptr;
  if (aoti_torch_library_init_impl("fp8_compile", "CPU", __FILE__, __LINE__, &library)) return "fp8_compile";
  for (const fp8::Implementation& one : fp8::IMPLEMENTATIONS)
    if (torch_library_impl(library, one.name, one.function, TORCH_ABI_VERSION)) return one.name;
  return nullptr;
}

}  // extern "C"
