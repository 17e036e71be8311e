#include "step/workspace.h"

#include <atomic>
#include <new>

namespace tw {

namespace {

std::atomic<int64_t> workspaces{0};

}  // namespace

Workspace::Workspace() { workspaces++; }
Workspace::~Workspace() { workspaces--; }

Workspace* new_workspace() { return new (std::nothrow) Workspace; }

void free_workspace(Workspace* workspace) { delete workspace; }

int64_t count_workspaces() { return workspaces; }

CallWorkspace::CallWorkspace(Workspace* shared)
    : shared_(shared && !shared->in_use.exchange(true, std::memory_order_acquire) ? shared : nullptr),
      used_(shared_ ? shared_ : new Workspace) {}

CallWorkspace::~CallWorkspace() {
  if (shared_)
    shared_->in_use.store(false, std::memory_order_release);
  else
    delete used_;
}

}  // namespace tw
