//! The pods over their limits in the model, by definition: by the reports, one by one.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use gpustow_api::gpunode::Gpu;
use gpustow_api::limit::Enforce;

use super::lending::{Heard, STALE_AFTER};
use super::shortages::There;
use super::world::{World, require};

pub(super) const OVER_FOR: Duration = Duration::from_secs(20);

impl World {
    /// The pods that are over their limits of a node's cards, by its report.
    pub(super) fn over_limits(&self, name: &str) -> BTreeSet<(Arc<str>, String)> {
        let known = self.known.get(name).filter(|_| self.is_readable(name));
        let cards = known.into_iter().flat_map(|it| &it.gpus);
        let each = cards.flat_map(|gpu| {
            let there = self.there(name, gpu).into_iter();
            let over = there.filter(|it| is_over(it, gpu));
            over.map(|it| (it.pod.uid.clone(), gpu.uuid.clone()))
        });
        each.collect()
    }

    /// A pod that must give back is over its limit now, by a fresh report, and was by all reports of long enough, unless
    /// it was asked already; and a pod that is and was, must give back.
    pub(super) fn check_over_limits(&self) -> Result<(), String> {
        if !self.switches.reclaim {
            return Ok(());
        }
        let found = self.ledger.over_limits(self.now).into_iter();
        let found = found.map(|over| {
            let victim = over.victim;
            (over.node, victim.pod.uid.clone(), victim.uuid.to_string())
        });
        let found: BTreeSet<(Arc<str>, Arc<str>, String)> = found.collect();
        let mut expected = BTreeSet::new();
        for (name, reports) in self.lending.reports() {
            for over in self
                .over_limits(name)
                .into_iter()
                .filter(|_| self.is_fresh(name))
            {
                let asked = self.ledger.pod(&over.0);
                let asked = asked.is_some_and(|pod| pod.asked_back.is_some());
                let lasts = lasted(reports, &over);
                if lasts.is_some_and(|lasts| asked || lasts >= OVER_FOR) {
                    expected.insert(((*name).into(), over.0, over.1));
                }
            }
        }
        require(found == expected, || {
            format!("over their limits are {expected:?}, not {found:?}")
        })
    }
}

fn is_over(it: &There, gpu: &Gpu) -> bool {
    let asks = it.pod.asks.request();
    let whole = asks.is_none_or(|request| request.exclusive);
    let seen_to = match it.pod.enforce {
        Enforce::Watch => true,
        Enforce::Driver => gpu.memory_limit.as_deref() == Some("Missing"),
        Enforce::None => false,
    };
    let known = matches!(it.pod.assignment, Some(Ok(_)));
    let limit = it.pod.limits.first().map_or(it.held, |limit| limit.0);
    let counts = gpu.healthy && seen_to && known && !whole && !it.pod.deleting;
    counts && it.held > 0 && it.used > limit.saturating_add((limit / 100).max(1))
}

/// For how long the last reports showed this without a silence; none if the last does not.
fn lasted(reports: &[Heard], over: &(Arc<str>, String)) -> Option<Duration> {
    let mut said = reports
        .iter()
        .rev()
        .take_while(|(_, all)| all.contains(over));
    let (last, _) = said.next()?;
    let mut first = *last;
    for (at, _) in said {
        if first - *at > STALE_AFTER {
            break;
        }
        first = *at;
    }
    Some(*last - first)
}
