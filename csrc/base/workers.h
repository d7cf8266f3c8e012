// Threads for calls that may take long, or never return, like those that pin memory or wait for the kernel. Tasks of
// one strand are carried out one after the other, those of different strands side by side: a call that hangs holds up
// what comes behind it on its strand, and nothing else.
#pragma once

#include <functional>
#include <memory>
#include <string>

namespace mr {

class Workers {
 public:
  class Strand;
  using StrandRef = std::shared_ptr<Strand>;

  Workers(std::string thread_name, size_t max_threads);
  ~Workers() { close(0); }
  Workers(const Workers&) = delete;
  Workers& operator=(const Workers&) = delete;

  static StrandRef new_strand();
  // Any thread. False, and the task is dropped, once it is closed, where there is no thread to be had, and in a forked
  // child. Tasks do not throw. Without a strand it waits for no other.
  bool run(std::function<void()> task, StrandRef strand = nullptr);
  // Takes no more, and waits until all is carried out, at most `limit` seconds (negative: for ever). False: some is
  // not; its threads go on. Not from a task.
  bool close(double limit);

 private:
  struct State;
  static void thread_main(const std::shared_ptr<State>& state);

  const std::shared_ptr<State> state_;  // the threads' too
};

}  // namespace mr
