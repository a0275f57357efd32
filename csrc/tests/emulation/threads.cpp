// The threads of a block as fibers; see cuda_runtime.h.
#include <cuda_runtime.h>
#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cstdio>
#include <memory>
#include <mutex>
#include <random>
#include <vector>

namespace emulation {

Position position;
dim3 grid_size, block_size;

namespace {

constexpr int kWarp = 32;
constexpr size_t kStackBytes = 256 << 10;

// Where threads wait for each other: those of a block, or the lanes of a mask.
struct Meeting {
  int waiting = 0;
  int needed = 0;
  unsigned turn = 0;          // how often all were there
  unsigned mask = 0;          // of lanes
  uint64_t values[2][kWarp];  // of lanes, for this turn and the last, which some may not have read

  void end_if_complete() {
    if (waiting > 0 && waiting >= needed) {
      waiting = 0;
      ++turn;
    }
  }
};

struct Warp {
  Meeting meetings[kWarp];  // by the first lane of their masks
};

struct Fiber {
  ucontext_t start;
  jmp_buf place;
  std::unique_ptr<char[]> stack = std::make_unique<char[]>(kStackBytes);
  Position position;
  bool has_started = false;
  bool is_alive = false;
  const Meeting* meeting = nullptr;  // that it waits for
  unsigned turn = 0;
};

std::vector<Fiber> fibers;
std::vector<Warp> warps;
Meeting block_meeting;
int alive = 0;
int running = 0;
jmp_buf scheduler;
void (*kernel_body)(void*) = nullptr;
void* kernel_arguments = nullptr;

[[noreturn]] void fail(const char* message) {
  std::fprintf(stderr, "emulation: block %u, thread %d: %s\n", position.block.x, running, message);
  std::abort();
}

}  // namespace

int lane() { return running % kWarp; }

namespace {

void leave() { _longjmp(scheduler, 1); }

void meet(Meeting& meeting) {
  Fiber& own = fibers[running];
  own.turn = meeting.turn;
  ++meeting.waiting;
  meeting.end_if_complete();
  if (meeting.turn == own.turn) {
    own.meeting = &meeting;
    if (_setjmp(own.place) == 0) {
      leave();
    }
  }
}

// A thread that has ended does not keep others waiting.
void run_fiber() {
  kernel_body(kernel_arguments);
  fibers[running].is_alive = false;
  --alive;
  --block_meeting.needed;
  block_meeting.end_if_complete();
  for (Meeting& meeting : warps[running / kWarp].meetings) {
    if ((meeting.mask >> lane() & 1u) != 0) {
      --meeting.needed;
      meeting.end_if_complete();
    }
  }
  leave();
}

bool can_run(const Fiber& fiber) {
  return fiber.is_alive && (fiber.meeting == nullptr || fiber.meeting->turn != fiber.turn);
}

void run(int number) {
  Fiber& fiber = fibers[number];
  running = number;
  position = fiber.position;
  fiber.meeting = nullptr;
  if (_setjmp(scheduler) != 0) {
    return;
  }
  if (fiber.has_started) {
    _longjmp(fiber.place, 1);
  }
  fiber.has_started = true;
  setcontext(&fiber.start);
}

void run_block(dim3 block, const std::vector<int>& order) {
  const int count = static_cast<int>(order.size());
  alive = count;
  block_meeting = {};
  block_meeting.needed = count;
  warps.assign((count + kWarp - 1) / kWarp, Warp{});
  for (int i = 0; i < count; ++i) {
    Fiber& fiber = fibers[i];
    fiber.has_started = false;
    fiber.is_alive = true;
    fiber.meeting = nullptr;
    fiber.position = {{i % block_size.x, i / block_size.x, 0}, block};
    getcontext(&fiber.start);
    fiber.start.uc_stack.ss_sp = fiber.stack.get();
    fiber.start.uc_stack.ss_size = kStackBytes;
    fiber.start.uc_link = nullptr;
    makecontext(&fiber.start, run_fiber, 0);
  }
  while (alive > 0) {
    bool has_run = false;
    for (const int number : order) {
      if (can_run(fibers[number])) {
        run(number);
        has_run = true;
      }
    }
    if (!has_run) {
      fail("waits for threads that do not come");
    }
  }
}

}  // namespace

void wait_for_block() { meet(block_meeting); }

void exchange(unsigned mask, uint64_t own, uint64_t (&values)[kWarp]) {
  if ((mask >> lane() & 1u) == 0) {
    fail("is not in the mask of its operation");
  }
  Meeting& meeting = warps[running / kWarp].meetings[__builtin_ctz(mask)];
  if (meeting.waiting == 0) {
    const int first = running / kWarp * kWarp;
    const int last = std::min(first + kWarp, static_cast<int>(block_size.x * block_size.y));
    meeting.mask = mask;
    meeting.needed = 0;
    for (int i = first; i < last; ++i) {
      meeting.needed += (mask >> (i - first) & 1u) != 0 && fibers[i].is_alive ? 1 : 0;
    }
  } else if (meeting.mask != mask) {
    fail("has another mask than the lanes that it meets");
  }
  uint64_t* const shared = meeting.values[meeting.turn % 2];
  shared[lane()] = own;
  meet(meeting);
  std::copy_n(shared, kWarp, values);
}

void run_grid(dim3 grid, dim3 block, void (*body)(void*), void* arguments) {
  static std::mutex one_at_a_time;
  const std::lock_guard<std::mutex> lock(one_at_a_time);
  static std::mt19937 generator(1);
  kernel_body = body;
  kernel_arguments = arguments;
  grid_size = grid;
  block_size = block;
  const size_t count = static_cast<size_t>(block.x) * block.y;
  if (fibers.size() < count) {
    fibers.resize(count);
  }
  std::vector<int> order(count);
  for (size_t i = 0; i < count; ++i) {
    order[i] = static_cast<int>(i);
  }
  std::shuffle(order.begin(), order.end(), generator);
  for (unsigned y = 0; y < grid.y; ++y) {
    for (unsigned x = 0; x < grid.x; ++x) {
      run_block(dim3(x, y), order);
    }
  }
}

}  // namespace emulation
