// 16-byte accesses.
#pragma once

#include <cstdint>
#include <type_traits>

#include "kernels/primitives/sizes.h"
#include "scalar_types.h"

namespace lossops::cuda {

template <typename scalar_t, int kBytes = sizeof(scalar_t)>
struct alignas(kVectorBytes) Vector {
  scalar_t values[kVectorSize<scalar_t>];

  __device__ __forceinline__ scalar_t get(int i) const { return values[i]; }
  __device__ __forceinline__ void set(int i, scalar_t value) { values[i] = value; }
  // 32 bits of a 4-byte type.
  __device__ __forceinline__ uint32_t word(int i) const {
    static_assert(sizeof(scalar_t) == 4);
    return __float_as_uint(values[i]);
  }
  __device__ __forceinline__ void set_word(int i, uint32_t word) {
    static_assert(sizeof(scalar_t) == 4);
    values[i] = __uint_as_float(word);
  }
};

// Half types stay in pairs: the compiler gives each 16-bit value a register of its own.
template <typename scalar_t>
struct alignas(kVectorBytes) Vector<scalar_t, 2> {
  uint32_t words[kVectorBytes / 4];

  __device__ __forceinline__ scalar_t get(int i) const {
    return scalar_t{static_cast<uint16_t>(words[i / 2] >> (16 * (i % 2)))};
  }
  __device__ __forceinline__ void set(int i, scalar_t value) {
    const uint32_t bits = value.bits;
    words[i / 2] =
        i % 2 == 0 ? (words[i / 2] & 0xffff0000u) | bits : (words[i / 2] & 0xffffu) | bits << 16;
  }
  __device__ __forceinline__ uint32_t word(int i) const { return words[i]; }
  __device__ __forceinline__ void set_word(int i, uint32_t word) { words[i] = word; }
};

// pointer must be 16-byte aligned; index counts vectors.
template <typename scalar_t>
__device__ __forceinline__ Vector<scalar_t> load_vector(const scalar_t* pointer, int64_t index) {
  return reinterpret_cast<const Vector<scalar_t>*>(pointer)[index];
}

template <typename scalar_t>
__device__ __forceinline__ void store_vector(scalar_t* pointer, int64_t index,
                                             const Vector<scalar_t>& vector) {
  reinterpret_cast<Vector<scalar_t>*>(pointer)[index] = vector;
}

// The same where `wanted`; else the vector stays as it is. By name, for a predicate where the
// compiler would branch. The vector must have a value: for one that has none the compiler may take
// what another load brings, and wait for that.
template <typename scalar_t>
__device__ __forceinline__ void load_vector_if(bool wanted, Vector<scalar_t>& vector,
                                               const scalar_t* pointer) {
  uint32_t words[] = {vector.word(0), vector.word(1), vector.word(2), vector.word(3)};
  asm volatile(
      "{\n"
      ".reg .pred wanted;\n"
      "setp.ne.b32 wanted, %5, 0;\n"
      "@wanted ld.global.v4.b32 {%0, %1, %2, %3}, [%4];\n"
      "}\n"
      : "+r"(words[0]), "+r"(words[1]), "+r"(words[2]), "+r"(words[3])
      : "l"(pointer), "r"(static_cast<int>(wanted))
      : "memory");
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    vector.set_word(i, words[i]);
  }
}
template <typename scalar_t>
__device__ __forceinline__ void store_vector_if(bool wanted, scalar_t* pointer,
                                                const Vector<scalar_t>& vector) {
  asm volatile(
      "{\n"
      ".reg .pred wanted;\n"
      "setp.ne.b32 wanted, %5, 0;\n"
      "@wanted st.global.v4.b32 [%4], {%0, %1, %2, %3};\n"
      "}\n"
      :
      : "r"(vector.word(0)), "r"(vector.word(1)), "r"(vector.word(2)), "r"(vector.word(3)),
        "l"(pointer), "r"(static_cast<int>(wanted))
      : "memory");
}

// A value of which the compiler does not know how it came to be: it would compute it anew for each
// of several uses, or an address for each of several accesses at constant distances. Of double it
// does.
template <typename T>
__device__ __forceinline__ T* unfolded(T* pointer) {
  asm volatile("" : "+l"(pointer));
  return pointer;
}
__device__ __forceinline__ uint32_t unfolded(uint32_t value) {
  asm volatile("" : "+r"(value));
  return value;
}
__device__ __forceinline__ int unfolded(int value) {
  return static_cast<int>(unfolded(static_cast<uint32_t>(value)));
}
__device__ __forceinline__ float unfolded(float value) {
  return __uint_as_float(unfolded(__float_as_uint(value)));
}
__device__ __forceinline__ double unfolded(double value) { return value; }

// In one of two branches. The compiler would take both and choose between their results, or make
// one access of two, for which it would compute 64-bit addresses instead of constant distances.
__device__ __forceinline__ void keep_apart() { asm volatile(""); }

// The aligned 4 bytes that an element lies in.
__device__ __forceinline__ const uint32_t* word_around(const void* element) {
  return reinterpret_cast<const uint32_t*>(reinterpret_cast<uintptr_t>(element) & ~uintptr_t{3});
}

// Neighbouring elements from any element's address, by the words that they lie in. load() starts to
// read, and word() may wait.
template <typename scalar_t, int kWords>
struct UnalignedWords {
  uint32_t words[kWords + 1];
  bool is_odd;  // the first element is the second of its word

  __device__ __forceinline__ void load(const scalar_t* from) {
    const uint32_t* const aligned = word_around(from);
    is_odd = sizeof(scalar_t) == 2 && (reinterpret_cast<uintptr_t>(from) & 2) != 0;
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      words[i] = aligned[i];
    }
    // Of the last word only the half that is wanted is read: the other half may be behind the end
    // of the memory.
    words[kWords] = is_odd ? reinterpret_cast<const uint16_t*>(from)[2 * kWords - 1] : 0;
  }
  __device__ __forceinline__ uint32_t word(int i) const {
    return __funnelshift_r(words[i], words[i + 1], is_odd ? 16 : 0);
  }
};

// How many bytes at once an address allows: 16, 8, 4, or the size of an element.
template <typename scalar_t>
__device__ __forceinline__ int access_width(const scalar_t* pointer) {
  const auto address = reinterpret_cast<uintptr_t>(pointer);
  if (address % 16 == 0) {
    return 16;
  }
  return address % 8 == 0 ? 8 : address % 4 == 0 ? 4 : 2;
}

namespace detail {

template <typename Word, typename scalar_t>
__device__ __forceinline__ void copy_words(void* to, const void* from) {
  if constexpr (sizeof(Word) >= sizeof(scalar_t)) {
#pragma unroll
    for (int i = 0; i < kVectorBytes / static_cast<int>(sizeof(Word)); ++i) {
      static_cast<Word*>(to)[i] = static_cast<const Word*>(from)[i];
    }
  }
}

template <typename scalar_t>
__device__ __forceinline__ void copy_vector(void* to, const void* from, int width) {
  if (width == 16) {
    copy_words<uint4, scalar_t>(to, from);
  } else if (width == 8) {
    copy_words<uint2, scalar_t>(to, from);
  } else if (width == 4) {
    copy_words<uint32_t, scalar_t>(to, from);
  } else {
    copy_words<uint16_t, scalar_t>(to, from);
  }
}

}  // namespace detail

// Vectors at any address. Which elements make a vector then does not depend on where a row lies,
// nor does the order of a sum over it. width: access_width() of the pointer.
template <typename scalar_t>
__device__ __forceinline__ Vector<scalar_t> load_vector_at(const scalar_t* pointer, int width) {
  Vector<scalar_t> vector;
  detail::copy_vector<scalar_t>(&vector, pointer, width);
  return vector;
}

template <typename scalar_t>
__device__ __forceinline__ void store_vector_at(scalar_t* pointer, int width,
                                                const Vector<scalar_t>& vector) {
  detail::copy_vector<scalar_t>(pointer, &vector, width);
}

// 32 bits of elements, rounded to scalar_t. Pairs of half types take one instruction, where single
// ones would each take one of the few that exponentials and logarithms need.
template <typename scalar_t>
__device__ __forceinline__ uint32_t pack_word(const float* values) {
  if constexpr (sizeof(scalar_t) == 4) {
    return __float_as_uint(values[0]);
  } else {
#if __CUDA_ARCH__ >= 800
    uint32_t word;
    if constexpr (std::is_same_v<scalar_t, half_t>) {
      asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(values[1]), "f"(values[0]));
    } else {
      asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(values[1]), "f"(values[0]));
    }
    return word;
#else
    return static_cast<uint32_t>(from_acc<scalar_t>(values[1]).bits) << 16 |
           from_acc<scalar_t>(values[0]).bits;
#endif
  }
}

template <typename scalar_t, typename acc_t>
__device__ __forceinline__ Vector<scalar_t> pack(const acc_t (&values)[kVectorSize<scalar_t>]) {
  Vector<scalar_t> vector;
  if constexpr (sizeof(scalar_t) == 2) {
#pragma unroll
    for (int i = 0; i < kVectorSize<scalar_t> / 2; ++i) {
      vector.words[i] = pack_word<scalar_t>(values + 2 * i);
    }
  } else {
#pragma unroll
    for (int i = 0; i < kVectorSize<scalar_t>; ++i) {
      vector.set(i, from_acc<scalar_t>(values[i]));
    }
  }
  return vector;
}

// What is computed from the vector after this is not what was computed from it before: spares the
// registers of conversions that the compiler would keep from one pass over it to the next.
template <typename scalar_t>
__device__ __forceinline__ void forget_conversions(Vector<scalar_t>& vector) {
  if constexpr (sizeof(scalar_t) == 2) {
#pragma unroll
    for (uint32_t& word : vector.words) {
      asm volatile("" : "+r"(word));
    }
  }
}

}  // namespace lossops::cuda
