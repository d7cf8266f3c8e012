// Which process is named to Yama so that the peers may read our memory.
#include "transport/ptrace.h"

#include <sys/wait.h>
#include <unistd.h>

#include <map>

#include "check.h"

using mr::tracer_for;

namespace {

// init 1 <- shell 10 <- launcher 100 <- template 110 <- workers 111, 112; 113 <- its own 1130
//                    <- editor 200                              init 1 <- service 20
int parent(int pid) {
  static const std::map<int, int> tree{{10, 1},    {100, 10},   {110, 100}, {111, 110}, {112, 110},
                                       {113, 110}, {1130, 113}, {200, 10},  {20, 1}};
  const auto found = tree.find(pid);
  return found == tree.end() ? 0 : found->second;
}

}  // namespace

TEST(one_peer_is_named_itself) {
  CHECK_EQ(tracer_for({}, parent), 0);
  CHECK_EQ(tracer_for({112}, parent), 112);
  CHECK_EQ(tracer_for({112, 112}, parent), 112);
}

TEST(of_several_the_nearest_that_all_descend_from) {
  CHECK_EQ(tracer_for({111, 112}, parent), 110);
  CHECK_EQ(tracer_for({111, 112, 1130}, parent), 110);
  CHECK_EQ(tracer_for({1130, 113}, parent), 113);
  CHECK_EQ(tracer_for({113, 1130}, parent), 113);
  CHECK_EQ(tracer_for({111, 100}, parent), 100);
  CHECK_EQ(tracer_for({112, 200}, parent), 10);
}

TEST(the_root_of_all_is_never_named) {
  CHECK_EQ(tracer_for({111, 20}, parent), 111);  // the later one goes without
  CHECK_EQ(tracer_for({111, 20, 112}, parent), 110);
  CHECK_EQ(tracer_for({1, 111}, parent), 111);
  CHECK_EQ(tracer_for({999}, parent), 999);  // it ended, or /proc is hidden: it alone
}

TEST(the_tree_is_the_kernels) {
  int pipes[2];
  CHECK_EQ(::pipe(pipes), 0);
  pid_t children[2];
  for (auto& child : children) {
    child = ::fork();
    if (child == 0) {
      char byte;
      ::close(pipes[1]);
      ::_exit(static_cast<int>(::read(pipes[0], &byte, 1)));
    }
    CHECK_EQ(mr::parent_of(child), ::getpid());
  }
  CHECK_EQ(mr::parent_of(::getpid()), ::getppid());
  CHECK_EQ(tracer_for({children[0], children[1]}, mr::parent_of), ::getpid());
  ::close(pipes[1]);
  for (const auto child : children) ::waitpid(child, nullptr, 0);
  ::close(pipes[0]);
  CHECK_EQ(mr::parent_of(children[0]), 0);
}

int main(int argc, char** argv) { return mr::test::run(argc, argv); }
