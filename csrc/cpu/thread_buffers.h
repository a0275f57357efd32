// Memory of a thread that is too large for its stack.
#pragma once

#include <memory>
#include <new>
#include <stdexcept>
#include <string>

namespace lossops::cpu {

// Returns the calling thread's T. It is not on the stack, which is small in some threads. The
// thread keeps it until it ends: to allocate it in each call took 5 % of the time. Its contents are
// those of the last call. While a function holds a T, nothing that it calls may ask for the same T.
template <typename T>
T& buffers_of_this_thread() {
  static thread_local std::unique_ptr<T> buffers;
  if (buffers == nullptr) {
    buffers.reset(new (std::nothrow) T);
  }
  if (buffers == nullptr) {
    throw std::runtime_error("lossops: out of memory: cannot allocate " +
                             std::to_string(sizeof(T)) + " bytes on cpu");
  }
  return *buffers;
}

}  // namespace lossops::cpu
