// The errors of the ops. C++ throws std::runtime_error, which reaches Python as RuntimeError.
#pragma once

#include <sstream>
#include <stdexcept>

namespace lossops::bindings {

template <typename... Parts>
[[noreturn]] void fail(const char* op, const Parts&... parts) {
  std::ostringstream message;
  message << op << ": ";
  (message << ... << parts);
  throw std::runtime_error(message.str());
}

#define LOSSOPS_CHECK(op, condition, ...) \
  if (!(condition)) {                     \
    fail(op, __VA_ARGS__);                \
  }

}  // namespace lossops::bindings
