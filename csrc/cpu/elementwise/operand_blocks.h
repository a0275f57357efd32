// Reads one operand, or writes one result, block by block.
//
// Little of it is inlined: it is the same for every loss, and takes no time beside a block.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cpu/block.h"
#include "cpu/elementwise/elements.h"

namespace lossops::cpu {

// Reads an operand. Where it repeats a short run, as a row beside a matrix, the run is read once,
// several times in a row: any block then lies there as one piece.
template <typename acc_t>
class OperandReader {
 public:
  bool exists() const { return operand_ != nullptr; }

  // The blocks begin at element `begin`, or where seek() says. An absent operand is left out.
  __attribute__((noinline)) void start(const IterationSpace& space, const Operand& operand,
                                       int64_t begin) {
    if (operand.data != nullptr) {
      operand_ = &operand;
      walker_.start(space, operand, begin);
    }
  }

  // The blocks are those of elements [begin, end), in order.
  __attribute__((noinline)) void start(const IterationSpace& space, const Operand& operand,
                                       int64_t begin, int64_t end) {
    start(space, operand, begin);
    if (exists() && kHasRuns) {
      run_length_ = walker_.repeated_run(end - begin);
      if (run_length_ > 0) {
        read_run(begin);
      }
    }
  }

  __attribute__((noinline)) void seek(int64_t index) { walker_.seek(index); }

  // The next block. It lies in memory or in the reader, until the next call.
  __attribute__((noinline)) Elements<acc_t> next(int count) {
    if (run_length_ > 0) {
      const acc_t* const elements = buffer_ + phase_;
      phase_ = (phase_ + count) % run_length_;
      return {elements, 1};
    }
    walker_.next(count);
    const BlockOffsets& at = walker_.block();
    if (at.stride == 0 && count <= at.first_length) {
      std::fill_n(buffer_, kVector, load_as<acc_t>(operand_->data, operand_->dtype, at.base));
      return {buffer_, 0};
    }
    return {view_block(*operand_, at, count, buffer_), 1};
  }

  // Reads the next block into `values`. Not where the operand may repeat a run.
  __attribute__((noinline)) void next(int count, acc_t* values) {
    walker_.next(count);
    load_block(*operand_, walker_.block(), count, values);
  }

 private:
  // fp64 has no room for runs: it is rare, and threads may have small stacks.
  static constexpr bool kHasRuns = sizeof(acc_t) == 4;
  static constexpr int kRoom = kHasRuns ? 2 * kBlock : kBlock;

  void read_run(int64_t begin) {
    phase_ = static_cast<int>(walker_.coordinate());
    walker_.seek(begin - phase_);
    walker_.next(run_length_);
    load_block(*operand_, walker_.block(), run_length_, buffer_);
    for (int filled = run_length_; filled < kRoom; filled *= 2) {
      std::copy_n(buffer_, std::min(filled, kRoom - filled), buffer_ + filled);
    }
  }

  const Operand* operand_ = nullptr;
  int run_length_ = 0;  // 0: no run is repeated
  int phase_ = 0;       // where in the run the next block begins
  OperandWalker walker_;
  alignas(64) acc_t buffer_[kRoom];
};

// Writes a result.
template <typename acc_t>
class OperandWriter {
 public:
  bool exists() const { return operand_ != nullptr; }

  // The blocks begin at element `begin`. An absent operand is left out.
  __attribute__((noinline)) void start(const IterationSpace& space, const Operand& operand,
                                       int64_t begin) {
    if (operand.data != nullptr) {
      operand_ = &operand;
      walker_.start(space, operand, begin);
    }
  }

  // Where to compute the next block: in the operand's own memory, if its elements lie there as
  // acc_t without need of padding, else in buffer.
  __attribute__((noinline)) acc_t* next(int count, acc_t* buffer) {
    walker_.next(count);
    const BlockOffsets& at = walker_.block();
    in_place_ = lies_as<acc_t>(*operand_, at, count) && count % kVector == 0;
    return in_place_ ? static_cast<acc_t*>(operand_->data) + at.base : buffer;
  }

  // Stores the block, if it was computed in the buffer.
  LOSSOPS_HOST_DEVICE void finish(int count, const acc_t* buffer) const {
    if (!in_place_) {
      store_block(*operand_, walker_.block(), count, buffer);
    }
  }

 private:
  const Operand* operand_ = nullptr;
  bool in_place_ = false;
  OperandWalker walker_;
};

}  // namespace lossops::cpu
