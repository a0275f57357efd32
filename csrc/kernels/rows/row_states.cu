#include "kernels/rows/row_states.cuh"

#include <type_traits>

#include "kernels/grid/launch.cuh"
#include "kernels/rows/entropy_row.cuh"

namespace lossops::cuda {

void launch_row_states(const RowSlice& slice, const RowSource& source, const RowCut& cut,
                       const LogitMapParams& map, bool wants_entropy, void* states,
                       cudaStream_t stream) {
  const RisingMap rising(map);
  const RowGrid grid(slice, cut.pieces);
  visit_row_types(source.input.dtype, cut.num_classes, rising.params,
                  [&](auto type, const auto& rising_map) {
                    using scalar_t = typename decltype(type)::scalar_type;
                    using Row = EntropyRow<acc_type_t<scalar_t>>;
                    using Map = std::decay_t<decltype(rising_map)>;
                    launch_kernel("row_states_kernel", row_states_kernel<Row, scalar_t, Map>,
                                  {grid.blocks(cut.lanes), kRowThreads}, stream, source, grid, cut,
                                  Row{wants_entropy}, type, map_of_pass(rising_map),
                                  rising.changes_signs, static_cast<typename Row::State*>(states));
                  });
}

}  // namespace lossops::cuda
