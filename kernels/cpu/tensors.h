// What an operation reads of torch's tensors, and how it refuses one that does not fit: by torch's stable C interface, so
// that the code is the same in a process of ours and in a package of AOTInductor.
//
// kernels/operands.py checks the same, with the same words, where there is no C++.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/c/shim.h>

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <stdexcept>
#include <string>
#include <utility>

namespace fp8 {

// An operand that an operation does not take: the message names it. Python has a RuntimeError of it.
struct Refused : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Operands that are right, and that there is no kernel for: the formula in Python is for them.
struct NoKernel {};

inline void succeed(AOTITorchError code) {
  if (code != AOTI_TORCH_SUCCESS) throw std::runtime_error("fp8_compile: torch could not read or make a tensor");
}

// A dtype of torch, under its name in Python and the number that the kernels have for it (fp8_formats.h: Dtype), if any.
struct NamedDtype {
  int32_t dtype;
  const char* name;
  int code;
};
inline const NamedDtype& dtype_named(int32_t dtype) {
  static const NamedDtype all[] = {
      {aoti_torch_dtype_float32(), "float32", 0},
      {aoti_torch_dtype_bfloat16(), "bfloat16", 1},
      {aoti_torch_dtype_float16(), "float16", 2},
      {aoti_torch_dtype_float8_e4m3fn(), "float8_e4m3fn", -1},
      {aoti_torch_dtype_float8_e5m2(), "float8_e5m2", -1},
      {aoti_torch_dtype_uint8(), "uint8", -1},
      {aoti_torch_dtype_int64(), "int64", -1},
      {aoti_torch_dtype_int32(), "int32", -1},
      {aoti_torch_dtype_float64(), "float64", -1},
      {aoti_torch_dtype_float8_e4m3fnuz(), "float8_e4m3fnuz", -1},
      {aoti_torch_dtype_float8_e5m2fnuz(), "float8_e5m2fnuz", -1},
      {aoti_torch_dtype_bool(), "bool", -1},
      {aoti_torch_dtype_int8(), "int8", -1},
      {aoti_torch_dtype_int16(), "int16", -1},
      {aoti_torch_dtype_uint16(), "uint16", -1},
      {aoti_torch_dtype_uint32(), "uint32", -1},
      {aoti_torch_dtype_uint64(), "uint64", -1},
      {aoti_torch_dtype_complex32(), "complex32", -1},
      {aoti_torch_dtype_complex64(), "complex64", -1},
      {aoti_torch_dtype_complex128(), "complex128", -1},
  };
  static const NamedDtype other{-1, "another dtype", -1};
  for (const NamedDtype& one : all)
    if (one.dtype == dtype) return one;
  return other;
}

// Read once. `data` belongs to the tensor.
struct Tensor {
  AtenTensorHandle handle = nullptr;
  void* data = nullptr;
  int64_t dims = 0, *sizes = nullptr, *strides = nullptr;
  int32_t dtype = -1, device_type = 0;

  explicit Tensor(AtenTensorHandle given) : handle(given) {
    succeed(aoti_torch_get_dim(handle, &dims));
    succeed(aoti_torch_get_sizes(handle, &sizes));
    succeed(aoti_torch_get_strides(handle, &strides));
    succeed(aoti_torch_get_dtype(handle, &dtype));
    succeed(aoti_torch_get_device_type(handle, &device_type));
    if (on_cpu()) succeed(aoti_torch_get_data_ptr(handle, &data));
  }

  bool on_cpu() const {
    static const int32_t cpu = aoti_torch_device_type_cpu();
    return device_type == cpu;
  }
  int code() const { return dtype_named(dtype).code; }
  bool is_e5m2() const { return dtype == aoti_torch_dtype_float8_e5m2(); }
  int64_t count() const {
    int64_t product = 1;
    for (int64_t d = 0; d < dims; ++d) product *= sizes[d];
    return product;
  }
  // Negative dimensions count from the end. 1 for a dimension that is not there.
  int64_t size(int64_t dim) const { return has(dim) ? sizes[at(dim)] : 1; }
  int64_t stride(int64_t dim) const { return has(dim) ? strides[at(dim)] : 0; }
  // From one element to the next along a dimension; 0 where there is one for all.
  int64_t step(int64_t dim) const { return size(dim) > 1 ? stride(dim) : 0; }
  bool is_contiguous() const {
    if (!count()) return true;
    int64_t expected = 1;
    for (int64_t d = dims; d-- > 0;) {
      if (sizes[d] > 1 && strides[d] != expected) return false;
      expected *= sizes[d];
    }
    return true;
  }
  template <class T> T* as() const { return static_cast<T*>(data); }

 private:
  bool has(int64_t dim) const { return -dims <= dim && dim < dims; }
  int64_t at(int64_t dim) const { return dim < 0 ? dim + dims : dim; }
};

// A tensor that is ours until it is given away.
class Owned {
 public:
  Owned() = default;
  explicit Owned(AtenTensorHandle handle) : handle_(handle) {}
  Owned(Owned&& other) noexcept : handle_(std::exchange(other.handle_, nullptr)) {}
  Owned& operator=(Owned&& other) noexcept {
    std::swap(handle_, other.handle_);
    return *this;
  }
  ~Owned() {
    if (handle_) aoti_torch_delete_tensor_object(handle_);
  }
  AtenTensorHandle get() const { return handle_; }
  AtenTensorHandle give() { return std::exchange(handle_, nullptr); }
  void* data() const {
    void* found = nullptr;
    succeed(aoti_torch_get_data_ptr(handle_, &found));
    return found;
  }
  template <class T> T* as() const { return static_cast<T*>(data()); }

 private:
  AtenTensorHandle handle_ = nullptr;
};

// A contiguous tensor on the CPU, not filled.
inline Owned new_tensor(const int64_t* sizes, int64_t dims, int32_t dtype) {
  constexpr int64_t MOST = 16;
  int64_t strides[MOST];
  if (dims > MOST) throw Refused("fp8_compile: expected at most 16 dimensions, got " + std::to_string(dims));
  int64_t next = 1;
  for (int64_t d = dims; d-- > 0; next *= std::max<int64_t>(sizes[d], 1)) strides[d] = next;
  AtenTensorHandle made = nullptr;
  static const int32_t cpu = aoti_torch_device_type_cpu();
  succeed(aoti_torch_empty_strided(dims, sizes, strides, dtype, cpu, 0, &made));
  return Owned(made);
}
inline Owned new_tensor(std::initializer_list<int64_t> sizes, int32_t dtype) {
  return new_tensor(sizes.begin(), int64_t(sizes.size()), dtype);
}

// A contiguous copy, in another dtype perhaps.
inline Owned copy_of(const Tensor& tensor, int32_t dtype) {
  Owned copy = new_tensor(tensor.sizes, tensor.dims, dtype);
  succeed(aoti_torch_copy_(copy.get(), tensor.handle, 0));
  return copy;
}

// A tensor in the form that a kernel reads: itself where it has that form, otherwise a copy that lives as long.
class Read {
 public:
  Read(const Tensor& tensor, bool as_it_is, int32_t dtype) : tensor_(tensor) {
    if (as_it_is && dtype == tensor.dtype) return;
    copy_ = copy_of(tensor, dtype);
    tensor_ = Tensor(copy_.get());
  }
  const Tensor* operator->() const { return &tensor_; }
  template <class T> T* as() const { return tensor_.as<T>(); }

 private:
  Tensor tensor_;
  Owned copy_;
};
inline Read contiguous(const Tensor& tensor) { return {tensor, tensor.is_contiguous(), tensor.dtype}; }
inline Read contiguous(const Tensor& tensor, int32_t dtype) { return {tensor, tensor.is_contiguous(), dtype}; }
// Of a matrix whose rows may be apart.
inline Read with_contiguous_rows(const Tensor& x) { return {x, x.size(1) <= 1 || x.stride(1) == 1, x.dtype}; }

inline int threads_for(int64_t work, int64_t least) {
  uint32_t threads = 1;
  if (work >= least) succeed(torch_get_num_threads(&threads));
  return int(threads);
}

// What is checked, in the words of kernels/operands.py.

constexpr int64_t ANY = -1;  // a size that may be any

// Of up to four dimensions.
struct Shape {
  int64_t dims, sizes[4];
  Shape(std::initializer_list<int64_t> given) : dims(int64_t(given.size())) { std::copy(given.begin(), given.end(), sizes); }
  bool fits(const Tensor& tensor) const {
    if (tensor.dims != dims) return false;
    for (int64_t d = 0; d < dims; ++d)
      if (sizes[d] != ANY && sizes[d] != tensor.sizes[d]) return false;
    return true;
  }
};

inline std::string tuple_of(const int64_t* values, int64_t count) {
  std::string text = "(";
  for (int64_t i = 0; i < count; ++i)
    text += (i ? ", " : "") + (values[i] == ANY ? std::string("any") : std::to_string(values[i]));
  return text + (count == 1 ? ",)" : ")");
}
inline std::string shape_of(const Tensor& tensor) { return tuple_of(tensor.sizes, tensor.dims); }

struct Dtypes {
  int32_t dtypes[5];
  int count;
  bool have(int32_t dtype) const { return std::find(dtypes, dtypes + count, dtype) != dtypes + count; }
  std::string names(const char* between) const {
    std::string text;
    for (int i = 0; i < count; ++i) text += (i ? between : "") + ("torch." + std::string(dtype_named(dtypes[i]).name));
    return text;
  }
};
inline const Dtypes& halves() {  // what the kernels read and write
  static const Dtypes dtypes{{aoti_torch_dtype_float32(), aoti_torch_dtype_bfloat16(), aoti_torch_dtype_float16()}, 3};
  return dtypes;
}
inline const Dtypes& floats() {
  static const Dtypes dtypes{
      {aoti_torch_dtype_float32(), aoti_torch_dtype_bfloat16(), aoti_torch_dtype_float16(), aoti_torch_dtype_float64()}, 4};
  return dtypes;
}
inline const Dtypes& formats() {
  static const Dtypes dtypes{{aoti_torch_dtype_float8_e4m3fn(), aoti_torch_dtype_float8_e5m2()}, 2};
  return dtypes;
}
inline const Dtypes& all_formats() {  // those of other chips included
  static const Dtypes dtypes{{aoti_torch_dtype_float8_e4m3fn(), aoti_torch_dtype_float8_e5m2(),
                              aoti_torch_dtype_float8_e4m3fnuz(), aoti_torch_dtype_float8_e5m2fnuz()}, 4};
  return dtypes;
}
inline const Dtypes& indices() {
  static const Dtypes dtypes{{aoti_torch_dtype_int64(), aoti_torch_dtype_int32()}, 2};
  return dtypes;
}
inline Dtypes only(int32_t dtype) { return {{dtype}, 1}; }
inline const Dtypes& fp32() {
  static const Dtypes dtypes = only(aoti_torch_dtype_float32());
  return dtypes;
}

[[noreturn]] inline void refuse(const char* op, const char* argument, const std::string& expected, const std::string& got) {
  throw Refused(std::string("fp8_compile::") + op + ": " + argument + ": expected " + expected + ", got " + got);
}

enum Layout { STRIDED, CONTIGUOUS };

// An error unless the tensor is on the CPU, of one of the dtypes and of one of the shapes, if any.
inline void check(const char* op, const char* argument, const Tensor& tensor, const Dtypes& dtypes,
                  std::initializer_list<Shape> shapes, Layout layout = STRIDED) {
  const bool fits = !shapes.size() || std::any_of(shapes.begin(), shapes.end(), [&](const Shape& s) { return s.fits(tensor); });
  if (dtypes.have(tensor.dtype) && tensor.on_cpu() && fits && (layout == STRIDED || tensor.is_contiguous())) return;
  std::string expected = dtypes.names(" or "), told;
  for (const Shape& shape : shapes) {
    const std::string text = tuple_of(shape.sizes, shape.dims);
    if (told.find(text) == std::string::npos) told += (told.empty() ? " of shape " : " or ") + text;
  }
  refuse(op, argument, expected + told + (layout == CONTIGUOUS ? ", contiguous," : "") + " on cpu",
         "torch." + std::string(dtype_named(tensor.dtype).name) + " of shape " + shape_of(tensor) + " with strides " +
             tuple_of(tensor.strides, tensor.dims) + " on " + (tensor.on_cpu() ? "cpu" : "another device"));
}

inline void check_dtype(const char* op, const char* argument, int32_t dtype, const Dtypes& allowed) {
  if (!allowed.have(dtype)) refuse(op, argument, "one of " + allowed.names(", "), "torch." + std::string(dtype_named(dtype).name));
}

// Which of the words it is.
inline int check_word(const char* op, const char* argument, const std::string& word, std::initializer_list<const char*> allowed) {
  int found = 0;
  std::string all;
  for (const char* one : allowed) {
    if (word == one) return found;
    all += (found++ ? ", " : "") + std::string(one);
  }
  refuse(op, argument, "one of " + all, word);
}

inline void check_at_least(const char* op, const char* argument, int64_t value, int64_t least) {
  if (value < least) refuse(op, argument, "at least " + std::to_string(least), std::to_string(value));
}

}  // namespace fp8
