#pragma once

#include <functional>
#include <string>
#include <thread>

namespace mr {

// Starts a thread that no signal of the program is delivered to, whose handlers must not find themselves on it; crashes
// stay visible. Throws MR_RESOURCE_EXHAUSTED.
std::thread start_without_signals(const std::string& name, std::function<void()> body);

}  // namespace mr
