// The host's half of pack.cu: tensors become boxes that a kernel walks with multiplications and shifts.

#include <algorithm>
#include <cstdint>
#include <vector>

#include "kernels.h"
#include "kernels/float_formats.h"

namespace {

constexpr int64_t kMaxUnits = (int64_t(1) << 31) - 1;  // so that find_offset's 32-bit arithmetic does not overflow
constexpr uint32_t kTileUnits = 2048;                  // pack.cu's tile
constexpr uint32_t kGroup = 8;                         // elements a thread casts at once where it can

struct Dim {
  int64_t count, stride;  // stride in bytes
};

// The largest power of two up to `most` that divides everything or-ed together in `numbers`.
uint32_t common_power(uint64_t numbers, uint32_t most) {
  while (numbers % most != 0) most /= 2;
  return most;
}

// Division by `count` as a multiplication and a shift, exact for every dividend below 2^31.
mr_gpu_dim divided(const Dim& dim) {
  mr_gpu_dim out = {};
  out.stride = dim.stride;
  out.count = uint32_t(dim.count);
  while ((uint64_t(1) << out.shift) < out.count) ++out.shift;
  out.multiplier = uint32_t(((uint64_t(1) << 32) * ((uint64_t(1) << out.shift) - out.count)) / out.count + 1);
  return out;
}

class Layout {
 public:
  explicit Layout(const mr_boxes_args& args) : args_(args), packed_(static_cast<char*>(args.packed)) {}

  bool add(const mr_gpu_part& part) {
    const uint32_t element = args_.cast ? mr::dtype_size(mr_dtype(part.dtype)) : 1;
    if (part.ndim > MR_GPU_DIMS || part.run % element != 0) return false;
    int64_t bytes = int64_t(part.run);
    std::vector<Dim> dims;
    for (uint32_t d = 0; d < part.ndim; ++d) {
      bytes *= int64_t(part.count[d]);
      dims.push_back({int64_t(part.count[d]), part.stride[d]});
    }
    if (bytes == 0) return true;
    const uint32_t packed_element = args_.cast ? mr::dtype_size(mr_dtype(args_.packed_dtype)) : 1;
    const uint32_t unit = unit_of(part, dims, element, packed_element);  // in elements
    if (part.run > unit * element) dims.push_back({int64_t(part.run / (unit * element)), int64_t(unit) * element});
    split(static_cast<char*>(part.data), dims, unit, unit * packed_element, part.dtype);
    packed_ += bytes / element * packed_element;
    return tiles_ <= kMaxUnits;
  }

  int64_t boxes() const { return boxes_; }
  uint32_t tiles() const { return uint32_t(tiles_); }

 private:
  // As large as both sides' alignment, and the run, let it be. Bytes go up to 16 at once, casts 8 elements or one.
  uint32_t unit_of(const mr_gpu_part& part, const std::vector<Dim>& dims, uint32_t element,
                   uint32_t packed_element) const {
    uint64_t strided = reinterpret_cast<uintptr_t>(part.data);
    for (const Dim& dim : dims) strided |= uint64_t(dim.stride);
    const uint64_t packed = reinterpret_cast<uintptr_t>(packed_);
    if (!args_.cast) return common_power(strided | packed | part.run, 16);
    const bool whole = part.run / element % kGroup == 0 && strided % std::min(16u, kGroup * element) == 0 &&
                       packed % std::min(16u, kGroup * packed_element) == 0;
    return whole ? kGroup : 1;
  }

  // Lays one box, or several along the outermost dimension where one would have too many units.
  void split(char* base, const std::vector<Dim>& dims, uint32_t unit, uint32_t packed_unit, uint32_t dtype) {
    int64_t inner = 1;
    for (size_t d = 1; d < dims.size(); ++d) inner *= dims[d].count;
    const int64_t rows = dims.empty() ? 1 : dims[0].count;
    const int64_t rows_at_once = std::max<int64_t>(1, kMaxUnits / inner);
    for (int64_t row = 0; row < rows; row += rows_at_once) {
      std::vector<Dim> piece = dims;
      if (!piece.empty()) piece[0].count = std::min(rows - row, rows_at_once);
      lay(base + (dims.empty() ? 0 : row * dims[0].stride), packed_ + row * inner * packed_unit, piece, unit, dtype);
    }
  }

  void lay(char* base, char* packed, const std::vector<Dim>& dims, uint32_t unit, uint32_t dtype) {
    mr_gpu_box box = {};
    box.part = base;
    box.packed = packed;
    box.first_tile = uint32_t(tiles_);
    box.units = 1;
    box.unit = unit;
    box.part_dtype = dtype;
    box.packed_dtype = args_.packed_dtype;
    for (size_t d = dims.size(); d-- > 0;) {
      box.dim[box.ndim++] = divided(dims[d]);
      box.units *= uint32_t(dims[d].count);
    }
    if (boxes_ < args_.capacity && args_.boxes != nullptr) args_.boxes[boxes_] = box;
    ++boxes_;
    tiles_ += (box.units + kTileUnits - 1) / kTileUnits;
  }

  const mr_boxes_args& args_;
  char* packed_;
  int64_t boxes_ = 0;
  int64_t tiles_ = 0;
};

}  // namespace

extern "C" int64_t mr_lay_boxes(const mr_boxes_args* args, uint32_t* tiles) {
  Layout layout(*args);
  for (int64_t i = 0; i < args->nparts; ++i) {
    if (!layout.add(args->parts[i])) return -1;
  }
  *tiles = layout.tiles();
  return layout.boxes();
}
