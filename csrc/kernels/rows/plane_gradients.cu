// Gradients of cross entropy with class indices, of rows whose classes are not neighbours: of a
// backward pass, and of steps whose loss another kernel has left. At any address; it is made for
// rows that lie side by side.
//
// A block has a tile (plane_gradients_plan.h). Its threads first compute the numbers of the tile's
// rows, one row a thread, then write the tile, and last the gradients at class indices.
#include <cstdint>

#include "kernels/grid/device.cuh"
#include "kernels/grid/launch.cuh"
#include "kernels/rows/cross_entropy_row.cuh"
#include "kernels/rows/index_gradient.cuh"
#include "kernels/rows/launches.cuh"
#include "kernels/rows/plane_gradients.cuh"
#include "kernels/rows/plane_gradients_plan.h"
#include "kernels/rows/row_gradient.cuh"
#include "launchers.h"

namespace lossops::cuda {
namespace plane_gradients {
namespace {

template <typename scalar_t>
__global__ void __launch_bounds__(kThreads, kResidentBlocks)
    plane_gradients_kernel(const __grid_constant__ CrossEntropyBackwardArgs args,
                           const __grid_constant__ StripGrid grid, const RowType<scalar_t> type) {
  using Tile = GradientTile<scalar_t>;
  __shared__ float memory[StripNumbers<scalar_t>::kFloats];
  __shared__ typename Tile::Copies copies;
  wait_for_previous_kernel();
  let_next_kernel_start();
  if (kept_is_right(args)) {
    return;
  }
  const uint32_t block = block_from_the_end();
  const uint32_t number = grid.tiles_of_strip.quotient(block);
  const int tile_of_strip = static_cast<int>(block - number * grid.tiles_of_strip.value);
  const Strip strip = grid.strip(number);
  const StripNumbers<scalar_t> numbers{memory};
  const int before = Tile::rows_before(strip);
  const int rows = (strip.planes - 1) * grid.length + strip.length + before;
  const TileClasses classes(grid, args.num_classes, tile_of_strip);
  const Tile tile(args, grid, strip, classes, numbers, copies);
  // The first logits are copied while the block computes the numbers of rows, whose loads depend on
  // each other.
  tile.start();
  const auto for_each_row = [&](const auto& body) {
#pragma unroll 1
    for (int n = static_cast<int>(threadIdx.x); n < rows; n += kThreads) {
      const int row = n - before;
      const int plane = row < 0 ? 0 : row / grid.length;
      body(n, PlaneRowPlace{args.rows, strip.begin + row - plane * grid.length,
                            strip.first_plane + plane});
    }
  };
  for_each_row([&](int n, const PlaneRowPlace& row) {
    numbers.put(
        n, index_gradient<Tile::kExact>(args, row.row(grid.positions), row.offset(args.input),
                                        row.offset(args.target), row.offset(args.grad_output)));
  });
  __syncthreads();
  tile.write(type);
  __syncthreads();  // what the tile has at class indices is written over
  for_each_row([&](int n, const PlaneRowPlace& row) {
    const auto gradient = numbers.get(n);
    write_at_index<scalar_t>(args, grid, strip, classes, row, gradient.index, gradient.at_index);
  });
}

}  // namespace
}  // namespace plane_gradients

void launch_plane_gradients(const CrossEntropyBackwardArgs& args, cudaStream_t stream) {
  using namespace plane_gradients;
  const Strips strips(args);
  const StripGrid grid(strips, args);
  const int64_t blocks = strips.count * grid.tiles_of_strip.value;
  visit_float_or_any_half(args.input.dtype, [&](auto like) {
    using scalar_t = typename decltype(like)::type;
    launch_kernel("plane_gradients_kernel", plane_gradients_kernel<scalar_t>,
                  {blocks, kThreads, 0, 1, true}, stream, args, grid,
                  RowType<scalar_t>(args.input.dtype));
  });
}

}  // namespace lossops::cuda
