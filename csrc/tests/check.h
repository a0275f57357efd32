// A failed CHECK is printed and counted, and the test goes on; main returns
// test::exit_status().
#pragma once

#include <cmath>
#include <cstdio>
#include <string>

namespace lossops::test {

inline int& failures() {
  static int count = 0;
  return count;
}

// What the checks at hand are about; printed where one of them fails.
inline std::string& subject() {
  static std::string text;
  return text;
}

inline void report(bool passed, const char* file, int line, const std::string& what) {
  constexpr int kMaxPrinted = 50;
  if (passed) {
    return;
  }
  if (++failures() <= kMaxPrinted) {
    std::fprintf(stderr, "%s:%d: %s\n    %s\n", file, line, what.c_str(), subject().c_str());
  }
}

inline std::string to_text(double value) {
  char text[64];
  std::snprintf(text, sizeof(text), "%.17g", value);
  return text;
}

// Equal, or both NaN, or no further apart than tolerance.
inline bool close(double got, double want, double tolerance) {
  if (std::isnan(want) || std::isnan(got)) {
    return std::isnan(want) && std::isnan(got);
  }
  return got == want || std::fabs(got - want) <= tolerance;
}

inline int exit_status() {
  if (failures() > 0) {
    std::fprintf(stderr, "%d checks failed\n", failures());
    return 1;
  }
  std::puts("all checks passed");
  return 0;
}

}  // namespace lossops::test

#define CHECK(condition) ::lossops::test::report((condition), __FILE__, __LINE__, #condition)

#define CHECK_CLOSE(got, want, tolerance)                                                        \
  do {                                                                                           \
    const auto got_value = static_cast<double>(got);                                             \
    const auto want_value = static_cast<double>(want);                                           \
    ::lossops::test::report(                                                                     \
        ::lossops::test::close(got_value, want_value, static_cast<double>(tolerance)), __FILE__, \
        __LINE__,                                                                                \
        #got " is " + ::lossops::test::to_text(got_value) + ", not " +                           \
            ::lossops::test::to_text(want_value));                                               \
  } while (false)
