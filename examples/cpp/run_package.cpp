// Run a package of fp8_compile.export with libtorch alone: no Python, nothing of fp8_compile.
//
//   run_package model.pt2 4 64        one float32 input [4, 64], its elements sin(0), sin(1), sin(2)...
//
// Prints every element of every result, one per line. CMakeLists.txt builds it; compare.py compares what it prints.
#include <ATen/ops/arange.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>

#include <cstdio>
#include <string>
#include <vector>

int main(int count, char** words) {
  if (count < 3) {
    std::fprintf(stderr, "usage: %s model.pt2 SIZE...\n", words[0]);
    return 2;
  }
  std::vector<int64_t> sizes;
  int64_t elements = 1;
  for (int i = 2; i < count; i++) {
    sizes.push_back(std::stoll(words[i]));
    elements *= sizes.back();
  }
  c10::InferenceMode inference;
  torch::inductor::AOTIModelPackageLoader loader(words[1]);
  const at::Tensor x = at::arange(elements, at::kDouble).sin().to(at::kFloat).view(sizes);
  for (const at::Tensor& result : loader.run({x})) {
    const at::Tensor flat = result.to(at::kFloat).contiguous().view({-1});
    for (int64_t i = 0; i < flat.numel(); i++) std::printf("%.9g\n", flat.data_ptr<float>()[i]);
  }
}
