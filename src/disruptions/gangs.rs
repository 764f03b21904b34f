//! Performs the demands for a gang: all of its victims are deleted in one look, or none.
//!
//! All are marked first. Then disruption budgets are looked at again, the API server is asked whether it would delete each, and
//! the ledger is asked whether all are needed still. If one of these fails, no victim is deleted.

use std::collections::BTreeSet;
use std::sync::Arc;

use futures::future::join_all;
use gpustow_api::Group;
use gpustow_ledger::Demand;

use super::conditions::is_settled;
use super::{Disruptions, Uid};
use crate::ask::AskError;

impl Disruptions {
    pub(super) async fn perform_for_gang(&mut self, epoch: u64, gang: &Group, all: &[&Demand]) {
        let is_left = |it: &&&Demand| !self.disrupted.contains(&it.victim.uid);
        let left: Vec<&Demand> = all.iter().filter(is_left).copied().collect();
        let pauses = left.iter().any(|demand| self.pauses(demand));
        if left.is_empty()
            || pauses
            || !self.are_wanted(gang, all)
            || !self.may_disrupt_all(gang, &left)
        {
            return;
        }
        let mut versions = Vec::new();
        for demand in &left {
            match self.mark(epoch, demand).await {
                Ok(Some(version)) => versions.push(version),
                Ok(None) => return,
                Err(error) => return self.tell_unless_settled(demand, &error),
            }
        }
        if !self.begun.contains(gang) && !self.do_budgets_allow(gang, &left) {
            return;
        }
        let tries = left.iter().zip(&versions);
        let tries = tries.map(|(demand, version)| self.terminate(demand, version.clone(), true));
        for (demand, tried) in left.iter().zip(join_all(tries).await) {
            if let Err(error) = tried {
                return self.tell_unless_settled(demand, &error);
            }
        }
        if self.app.epoch.confirm(epoch).await.is_err() || !self.are_wanted(gang, all) {
            return;
        }
        self.begun.insert(gang.clone());
        let ends = left.iter().zip(versions);
        let ends = ends.map(|(demand, version)| self.terminate(demand, version, false));
        for (demand, ended) in left.iter().zip(join_all(ends).await) {
            match ended {
                Ok(()) => self.done(demand),
                // The next look goes on with it.
                Err(error) => self.tell_unless_settled(demand, &error),
            }
        }
    }

    fn tell_unless_settled(&mut self, demand: &Demand, error: &AskError) {
        if !is_settled(error) {
            self.failed(demand, error);
        }
    }

    /// Are these the victims that the gang needs now?
    fn are_wanted(&self, gang: &Group, all: &[&Demand]) -> bool {
        let now = self.app.ledger.now();
        let needed = self.app.ledger.lock().preemptions_of(gang, now);
        let needed = needed.iter().flat_map(|it| &it.victims);
        let needed: BTreeSet<&Uid> = needed.map(|pod| &pod.uid).collect();
        let demanded: BTreeSet<&Uid> = all.iter().map(|it| &it.victim.uid).collect();
        needed == demanded
    }

    /// Do the limits of all disruptions together allow all of these, which count as one on each of their nodes? Then they
    /// count.
    fn may_disrupt_all(&mut self, gang: &Group, left: &[&Demand]) -> bool {
        let limits = self.app.config.spec().disruptions.clone();
        let now = self.app.ledger.now();
        let [all, here] = [limits.per_minute, limits.per_node_per_minute].map(|it| it as usize);
        let new = left.iter().filter(|it| !it.is_marked());
        let nodes: BTreeSet<&Arc<str>> = new.map(|it| &it.node).collect();
        let may_on = |node: &&Arc<str>| self.lately.left_of(node, here, now) > 0;
        let may = nodes.iter().all(may_on) && (nodes.is_empty() || self.lately.left(all, now) > 0);
        if may {
            nodes
                .into_iter()
                .for_each(|node| self.lately.note(node.clone(), now));
        } else {
            tracing::warn!(
                %gang, victims = left.len(),
                "more disruptions than spec.disruptions of the GpustowConfig allows: those for this group wait"
            );
            for pod in left.iter().filter_map(|it| it.purpose.pod()) {
                self.app.events.limited(pod);
            }
        }
        may
    }

    /// Would no budget be broken if all of these were gone?
    fn do_budgets_allow(&mut self, gang: &Group, left: &[&Demand]) -> bool {
        let mut ledger = self.app.ledger.lock();
        let allow = !ledger.breaks_budget(left.iter().map(|demand| &demand.victim));
        if !allow {
            tracing::info!(%gang, "a disruption budget protects a victim of this group: no pod is preempted for it");
            ledger.spare_for_gang(gang);
        }
        allow
    }
}
