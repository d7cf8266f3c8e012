#include "mapped_view.h"

#include <cstring>

#include "failure.h"
#include "transfers.h"

namespace mr::bench {

MappedView::MappedView(mr_remote* remote, uint64_t size) : remote_(remote), local_(Buffer::touched(size)), size_(size) {
  mr_error error{};
  uint32_t writable = 0;
  check(mr_remote_map(remote, kOperationTimeout, &mapped_, &writable, &error), error, "mapping the owner's memory");
}

MappedView::~MappedView() { mr_remote_unmap(remote_, mapped_, nullptr); }

void MappedView::copy() { std::memcpy(local_.data(), mapped_, size_); }

}  // namespace mr::bench
