// The verbs lane: reads and writes by RDMA cards, without the owner's processor.
#pragma once

#include "lane.h"
#include "verbs_domain.h"

namespace mr {

std::shared_ptr<Link> make_verbs(LinkHost& host, const std::shared_ptr<VerbsDomain>& domain);

}  // namespace mr
