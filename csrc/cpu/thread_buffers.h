// Memory of a thread that is too large for its stack.
#pragma once

#include <memory>
#include <new>
#include <stdexcept>
#include <string>

namespace lossops::cpu {

// A T of this thread. Not on the stack, which is small in some threads, and kept for the thread's
// next call: to allocate it for each took 5 % of the time. It has what the last call left there.
// Nobody may take a T while somebody further up the stack has it.
template <typename T>
T& buffers_of_this_thread() {
  static thread_local std::unique_ptr<T> buffers;
  if (buffers == nullptr) {
    buffers.reset(new (std::nothrow) T);
  }
  if (buffers == nullptr) {
    throw std::runtime_error("cross_entropy: out of memory: cannot allocate " +
                             std::to_string(sizeof(T)) + " bytes on cpu");
  }
  return *buffers;
}

}  // namespace lossops::cpu
