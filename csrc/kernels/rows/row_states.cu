#include "kernels/rows/row_states.cuh"

#include <type_traits>

#include "kernels/grid/launch.cuh"
#include "kernels/rows/token_values.cuh"

namespace lossops::cuda {

void launch_row_states(const RowSlice& slice, const RowSource& source, const RowCut& cut,
                       const LogitMapParams& map, bool wants_entropy, void* states,
                       cudaStream_t stream) {
  const RisingMap rising(map);
  const RowGrid grid(slice, cut.pieces);
  visit_rows(source.input.dtype, cut.num_classes, rising.params,
             [&](auto type, const auto& of_call) {
               using scalar_t = typename decltype(type)::scalar_type;
               using Row = TokenRow<acc_type_t<scalar_t>>;
               using Map = std::decay_t<decltype(of_call)>;
               launch_kernel("row_states_kernel", row_states_kernel<Row, scalar_t, Map>,
                             {grid.blocks(cut.lanes), kRowThreads}, stream, source, grid, cut,
                             Row{wants_entropy}, type, map_of_pass(of_call), rising.changes_signs,
                             static_cast<typename Row::State*>(states));
             });
}

}  // namespace lossops::cuda
