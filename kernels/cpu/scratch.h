// Memory for packed panels, kept by each thread: asking the system for megabytes anew costs a page fault each 4 KB.
//
// One piece a thread serves every product of the library, as they come one after the other: a piece for each kind of
// product was up to five of 12 MB. A product takes the piece and puts it back: one inside of another would find nothing
// there and get memory of its own.
#pragma once

#include <cstddef>
#include <cstdlib>
#include <memory>
#include <new>
#include <utility>

namespace fp8 {

class Scratch {
 public:
  explicit Scratch(size_t size) : piece_(std::exchange(kept(), {})) {
    if (piece_.size >= size) return;
    piece_ = {};
    void* fresh = std::aligned_alloc(64, (size + 63) / 64 * 64);
    if (!fresh) throw std::bad_alloc();
    piece_ = {std::unique_ptr<char, Free>(static_cast<char*>(fresh)), size};
  }
  ~Scratch() {
    if (piece_.size > kept().size) kept() = std::move(piece_);
  }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  char* memory() const { return piece_.memory.get(); }

 private:
  struct Free { void operator()(char* p) const { std::free(p); } };
  struct Piece {
    std::unique_ptr<char, Free> memory;
    size_t size = 0;
  };

  // Hidden: a library of another version in the same process has its own.
  __attribute__((visibility("hidden"))) static Piece& kept() {
    static thread_local Piece piece;
    return piece;
  }

  Piece piece_;
};

}  // namespace fp8
