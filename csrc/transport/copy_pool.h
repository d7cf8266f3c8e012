// The threads that carry out large copies between processes of one host, one pool a process. A job is cut in chunks
// that several threads claim, pool threads and threads that wait for the job alike; the last one to leave ends it.
#pragma once

#include <memory>
#include <thread>
#include <vector>

#include "op.h"
#include "options.h"

namespace mr {

class CopyJob {
 public:
  virtual ~CopyJob() = default;
  virtual Status begin() = 0;                                              // once, before the first chunk
  virtual Status copy(uint64_t begin, uint64_t length) = 0;                // one chunk; a failure ends the job early
  virtual void end(Status status, uint32_t chunks, uint32_t threads) = 0;  // once, when no thread is in it any more
};

class CopyPool {
 public:
  // The pool of this process (a forked child gets its own), alive while somebody holds it. Idle threads sleep.
  static std::shared_ptr<CopyPool> of_process();
  CopyPool();
  ~CopyPool();
  CopyPool(const CopyPool&) = delete;
  CopyPool& operator=(const CopyPool&) = delete;

  // Ends in job->end, from another thread or from one that helps. At most max_threads work at it at a time; with
  // max_threads == 1 the chunks are copied in order. Chunks have at most max_chunk bytes: for bytes that are slow to
  // copy. Throws MR_RESOURCE_EXHAUSTED where no thread can be started.
  std::shared_ptr<OpHelper> submit(std::shared_ptr<CopyJob> job, uint64_t bytes, uint32_t max_threads,
                                   uint64_t max_chunk = UINT64_MAX);

 private:
  struct State;
  class Task;

  void start_threads(uint32_t wanted);

  const int pid_;
  const std::shared_ptr<State> state_;
  std::mutex threads_lock_;
  std::vector<std::thread> threads_;
};

// option copy_threads; 0: as many as there are cores for us, at most 4 (memory is the bound).
uint32_t copy_threads(const Options& options);

}  // namespace mr
