// The first touch of fresh memory: the kernel maps and clears it page by page, which for a large
// gradient costs more than computing it. In pages of 2 MiB it costs a fraction of that.
#pragma once

#include <cstdint>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace lossops::cpu {

// Asks for huge pages where memory is about to be written for the first time. Only for what lies
// in whole huge pages, so the process grows by nothing it would not write anyway. A system set to
// hand out none (transparent_hugepage/enabled: never) hands out none.
inline void advise_huge_pages(void* data, int64_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  constexpr uintptr_t kHugePage = uintptr_t{1} << 21;
  const uintptr_t address = reinterpret_cast<uintptr_t>(data);
  const uintptr_t begin = (address + kHugePage - 1) & ~(kHugePage - 1);
  const uintptr_t end = (address + static_cast<uintptr_t>(bytes)) & ~(kHugePage - 1);
  if (data != nullptr && begin < end) {
    // Refused where the kernel has no huge pages; ordinary ones then serve.
    (void)madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
  }
#else
  (void)data;
  (void)bytes;
#endif
}

}  // namespace lossops::cpu
