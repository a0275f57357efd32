// How rows are cut and dealt out (kernels/rows/row_cut.h), on the host: every element of a row is
// taken once, nothing is read beyond its ends at any address, and every row has its place.
#include <algorithm>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "kernels/rows/row_cut.h"
#include "tests/check.h"

namespace lossops::cuda {
namespace {

std::mt19937_64 generator(1);

int64_t draw(int64_t low, int64_t high) {
  return std::uniform_int_distribution<int64_t>(low, high)(generator);
}

bool all_once(const std::vector<int>& taken) {
  return std::all_of(taken.begin(), taken.end(), [](int times) { return times == 1; });
}

// Whether the two aligned vectors that hold a vector are of the row where it is misaligned.
// first, end: of the vector, in elements of a row that begins `phase` elements behind an aligned
// address.
bool is_readable(int64_t first, int64_t num_classes, int size, int phase) {
  const int64_t before = (first + phase) % size;
  return before == 0 ? first + size <= num_classes
                     : first - before >= 0 && first - before + 2 * size <= num_classes;
}

void check_cut(int64_t num_classes, int64_t element_bytes) {
  const RowCut cut = RowCut::of(num_classes, element_bytes);
  const int size = 1 << vector_shift_of(element_bytes);
  std::vector<int> taken(num_classes);
  std::vector<int> numbers(cut.vectors);
  CHECK(kRowThreads % cut.lanes == 0 && kLeastLanes <= cut.lanes && cut.lanes <= 32);
  CHECK(cut.vectors - cut.inner <= kOuterVectors);
  // As row_states_kernel counts.
  for (int piece = 0; piece < cut.pieces; ++piece) {
    for (int lane = 0; lane < cut.lanes; ++lane) {
      for (int i = 0; i < piece_rounds(element_bytes) * kRowVectors; ++i) {
        const int round = i / kRowVectors * cut.pieces + piece;
        const int number = (round * kRowVectors + i % kRowVectors) * cut.lanes + lane;
        if (number >= cut.vectors) {
          continue;
        }
        ++numbers[number];
        const int position = cut.position(number);
        const int elements = cut.elements(position, size);
        CHECK(0 < elements && elements <= size);
        for (int e = 0; e < elements; ++e) {
          ++taken[int64_t{position} * size + e];
        }
        if (number < cut.inner) {
          CHECK(elements == size);
          for (int phase = 0; phase < size; ++phase) {
            CHECK(is_readable(int64_t{position} * size, num_classes, size, phase));
          }
        }
      }
    }
  }
  CHECK(all_once(numbers));
  CHECK(all_once(taken));
  // Lanes would idle.
  CHECK(cut.lanes == kLeastLanes || cut.vectors > cut.lanes / 2 * kRowVectors);
  CHECK(cut.pieces == 1 ||
        (cut.lanes == 32 &&
         2 * cut.vectors > piece_rounds(element_bytes) * kRowVectors * 32 * cut.pieces));
}

void check_parts(int64_t num_classes, int64_t element_bytes) {
  const RowParts plan =
      RowParts::of(num_classes, element_bytes, 128 * static_cast<int>(draw(1, 4)));
  const int size = 1 << vector_shift_of(element_bytes);
  for (int head = -1; head < size; ++head) {
    std::vector<int> taken(num_classes);
    const bool are_neighbours = head >= 0;
    // Any vector of a line; what is less than 0 wraps to the largest addresses.
    const auto address = static_cast<uint32_t>(kVectorBytes * draw(0, 2 * kLineVectors) -
                                               std::max(head, 0) * element_bytes);
    const auto address_of = [&](int64_t c) {
      return static_cast<uint32_t>(address + c * element_bytes);
    };
    for (int number = 0; number < plan.parts; ++number) {
      const RowPart part = RowPart::of(plan, number, are_neighbours, address);
      const int64_t begin = part.first_class + int64_t{part.begin} * size;
      CHECK(number == 0 || !are_neighbours || part.begin == part.inner ||
            address_of(begin) % kLineBytes == 0);
      for (int64_t v = part.begin; v < part.end; ++v) {
        const int64_t first = part.first_class + v * size;
        CHECK((first - head) % size == 0);
        CHECK(address_of(first) % kVectorBytes == 0);
        for (int phase = 0; phase < size; ++phase) {
          CHECK(is_readable(first, num_classes, size, phase));
        }
        for (int e = 0; e < size; ++e) {
          ++taken[first + e];
        }
      }
      const int more =
          number + 1 == plan.parts
              ? static_cast<int>(address_of(part.first_class) % kLineBytes / kVectorBytes)
              : 0;
      CHECK(3 * (part.end - part.begin - more) <= 4 * plan.vectors);
      CHECK(head < 0 || part.singles <= 4 * size);
      for (int64_t i = 0; i < part.singles; ++i) {
        const int64_t c = part.class_of_single(i);
        CHECK(0 <= c && c < num_classes);
        if (0 <= c && c < num_classes) {
          ++taken[c];
        }
      }
    }
    CHECK(all_once(taken));
  }
}

// The rows of a block fit its memory, and lie there so that lanes read from different banks.
void check_short_rows(int64_t num_classes, int64_t element_bytes) {
  if (!ShortRows::are_short(num_classes, element_bytes)) {
    CHECK(num_classes == 0 || num_classes * element_bytes > 4096);
    return;
  }
  const int64_t bytes = num_classes * element_bytes;
  ShortRows::Layout layout;
  layout.are_aligned = draw(0, 1) == 0;
  switch (draw(0, 3)) {
    case 0:  // rows follow one another
      layout.row_stride = num_classes;
      layout.are_aligned = layout.are_aligned && bytes % 16 == 0;
      break;
    case 1:  // with small gaps
      layout.row_stride = num_classes + draw(1, 32 / element_bytes);
      layout.are_aligned = layout.are_aligned && layout.row_stride * element_bytes % 16 == 0;
      break;
    case 2:  // classes are not neighbours
      layout.are_apart = true;
      break;
    default:  // anywhere
      break;
  }
  const auto most_turns = static_cast<int>(draw(1, ShortRows::kMostTurns));
  const ShortRows plan(num_classes, element_bytes, layout, most_turns);
  CHECK(plan.lanes <= 32 && plan.turn_rows * plan.lanes == kRowThreads);
  const int turns = plan.rows / plan.turn_rows;
  CHECK(0 < turns && turns <= (plan.lanes == 1 ? most_turns : 1));
  CHECK(plan.rows == turns * plan.turn_rows);
  CHECK(plan.rows * bytes <= ShortRows::kBlockBytes);
  const int64_t pitch_bytes = plan.pitch * element_bytes;
  CHECK(plan.rows * pitch_bytes + 16 <= ShortRows::kSharedBytes);
  // One more would not fit.
  CHECK(plan.lanes > 1 || turns == most_turns || (turns + 1) * pitch_bytes > ShortRows::kLaneBytes);
  CHECK(plan.pitch >= num_classes);
  CHECK(plan.in_vectors == (bytes % 16 == 0));
  CHECK(plan.run_stride == 0 || plan.run_stride == layout.row_stride);
  // Rows that follow one another are a run, unless four or more rows of a warp would begin in the
  // same bank. Those are whole vectors that are not aligned.
  if (layout.row_stride == num_classes) {
    CHECK(plan.run_stride > 0 || (!plan.is_aligned && bytes % 16 == 0));
  }
  if (plan.run_stride > 0 && !plan.is_aligned) {
    // As in global memory.
    CHECK(plan.pitch == plan.run_stride && plan.gap_vectors == 0 && !plan.has_phases);
  } else {
    CHECK(pitch_bytes % 16 == 0);
    CHECK(plan.is_aligned == (plan.in_vectors && (layout.are_aligned || layout.are_apart)));
    CHECK(plan.has_phases == (!layout.are_aligned && !layout.are_apart));
    // Where a row may begin within a vector, its last elements need one more.
    CHECK(!plan.has_phases || plan.pitch >= num_classes + 16 / element_bytes - 1);
    if (plan.in_vectors) {
      // Eight lanes at a time read a vector each, from different banks.
      std::vector<int> banks(8);
      for (int lane = 0; lane < 8; ++lane) {
        ++banks[(lane / plan.lanes * (pitch_bytes / 16) + lane % plan.lanes) % 8];
      }
      CHECK(all_once(banks));
    } else {
      // All lanes of a warp read a word each. Rows begin at vectors, so those of one or two lanes
      // share banks.
      std::vector<int> banks(32);
      for (int lane = 0; lane < 32; ++lane) {
        ++banks[(lane / plan.lanes * (pitch_bytes / 4) + lane % plan.lanes) % 32];
      }
      CHECK(*std::max_element(banks.begin(), banks.end()) == std::max(4 / plan.lanes, 1));
    }
  }
  if (plan.run_stride > 0 && plan.is_aligned) {
    // Rows follow one another with their gaps.
    const auto vectors = static_cast<int>(bytes / 16);
    for (int v = 0; v < 3 * vectors; ++v) {
      CHECK(plan.shared_vector(v) == v / vectors * (pitch_bytes / 16) + v % vectors);
    }
  } else if (plan.run_stride > 0) {
    CHECK(plan.shared_vector(5) == 5);
  }
  // With half the lanes, each would have more than kLaneBytes.
  CHECK(plan.lanes == 1 || plan.lanes / 2 * ShortRows::kLaneBytes < bytes);
  const int64_t rows = draw(1, 10000);
  CHECK(plan.blocks(rows) * plan.rows >= rows && (plan.blocks(rows) - 1) * plan.rows < rows);
}

// Slices of few rows have every row of a space once, where its operand has it.
void check_slices(const IterationSpace& rows, const Operand& operand, int64_t most_rows,
                  int shares) {
  std::vector<int> taken(rows.numel * shares);
  for_each_slice(rows, most_rows, [&](const RowSlice& slice) {
    CHECK(slice.rows() <= most_rows);
    const Operand own = slice(operand);
    const RowGrid grid(slice, shares);
    const int64_t lanes = int64_t{8} << draw(0, 2);
    CHECK(grid.blocks(static_cast<int>(lanes)) * kRowThreads >= slice.rows() * shares * lanes);
    for (int64_t group = 0; group < slice.rows() * shares; ++group) {
      const RowGrid::Place place = grid.place(static_cast<uint32_t>(group));
      CHECK(0 <= place.row && place.row < rows.numel && place.share < shares);
      ++taken[place.row * shares + place.share];
      int64_t offset = 0;
      int64_t row = place.row;
      for (int dim = 0; dim < rows.ndim; ++dim) {
        offset += row % rows.sizes[dim] * operand.strides[dim];
        row /= rows.sizes[dim];
      }
      const int64_t shift = (static_cast<char*>(own.data) - static_cast<char*>(operand.data)) /
                            element_size(operand.dtype);
      CHECK(shift + place.offset(own) == offset);
    }
    // Lanes without a row of their own stay within the slice.
    const RowGrid::Place last = grid.place(static_cast<uint32_t>(slice.rows() * shares + 5));
    CHECK(last.row < rows.numel && last.i0 < slice.sizes[0] && last.i1 < slice.sizes[1]);
  });
  CHECK(all_once(taken));
}

void check_drawn_slices() {
  IterationSpace rows;
  rows.ndim = static_cast<int>(draw(0, 4));
  rows.numel = 1;
  Operand operand;
  // An address that nobody reads.
  operand.data = reinterpret_cast<char*>(uintptr_t{1} << 40);
  operand.dtype = draw(0, 1) == 0 ? DType::kFloat16 : DType::kFloat64;
  for (int dim = 0; dim < rows.ndim; ++dim) {
    rows.sizes[dim] = draw(1, 9);
    rows.numel *= rows.sizes[dim];
    operand.strides[dim] = draw(0, 1000);
  }
  for (const int64_t most_rows : {draw(1, 10), draw(1, 100), int64_t{1} << 20}) {
    check_slices(rows, operand, most_rows, static_cast<int>(draw(1, 5)));
  }
}

}  // namespace
}  // namespace lossops::cuda

int main() {
  using namespace lossops;
  for (const int64_t element_bytes : {2, 4, 8}) {
    std::vector<int64_t> classes;
    for (int64_t c = 0; c < 300; ++c) {
      classes.push_back(c);
    }
    for (const int64_t vectors : {32, 64, 128, 512, 1024, 4096}) {
      for (int64_t c = -2; c <= 2; ++c) {
        classes.push_back(vectors * 16 / element_bytes + c);
      }
    }
    for (int i = 0; i < 40; ++i) {
      classes.push_back(cuda::draw(1, 60000));
    }
    for (const int64_t c : classes) {
      test::subject() =
          std::to_string(c) + " classes of " + std::to_string(element_bytes) + " bytes";
      cuda::check_cut(c, element_bytes);
      cuda::check_short_rows(c, element_bytes);
      if (c > 0) {
        cuda::check_parts(c, element_bytes);
      }
    }
  }
  // Rows of a length that no test has memory for are still cut without an overflow.
  test::subject() = "the longest row";
  const cuda::RowCut longest = cuda::RowCut::of((cuda::kMostVectors + 1) * 8 - 1, 2);
  CHECK(int64_t{longest.pieces} * cuda::piece_rounds(2) * cuda::kRowVectors * longest.lanes >=
        longest.vectors);
  CHECK(longest.position(longest.vectors - 1) == longest.vectors - 1);
  for (int n = 0; n < 300; ++n) {
    test::subject() = "slices " + std::to_string(n);
    cuda::check_drawn_slices();
  }
  return test::exit_status();
}
