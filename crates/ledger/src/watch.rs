//! The state from watches, lists and our own reads.

use std::sync::Arc;
use std::time::Duration;

use gpustow_api::gpunode::GpuNodeStatus;
use gpustow_api::{DisruptionBudget, Group, NodeFacts, PodFacts, PodGroupFacts};
use gpustow_books::HashSet;
use gpustow_pack::{PolicyKind, Request};

use crate::Ledger;

impl Ledger {
    /// The policy that applies to a request.
    #[must_use]
    pub fn policy(&self, request: &Request) -> PolicyKind {
        self.parts.scores.policy(request)
    }

    /// Learns the requests of pods again, from the known pods and from nothing else, so that a restart loses nothing.
    /// Filter does this by itself when the number of pods has changed by a third. Call it now and then, so that a mix
    /// that changes at constant numbers is followed.
    pub fn learn(&mut self) {
        self.parts.scores.learn(&self.parts.books);
    }

    /// Does the likely next work of filter in advance, so that kube-scheduler does not wait for it. It learns, and
    /// scores at most `limit` nodes for requests that came lately. True if there may be more to score.
    pub fn warm(&mut self, limit: usize) -> bool {
        self.parts.scores.warm(limit, &self.parts.books)
    }

    /// The ledger's own clock: the number of copies of pods, ends of pods and reservations that it has noted. Later
    /// notes have at least this number, so that a read of the API server is in order with all else. Take the number
    /// before the read is sent.
    #[must_use]
    pub fn copies(&self) -> u64 {
        self.parts.books.copies()
    }

    /// A pod as a watch shows it.
    pub fn apply_pod(&mut self, pod: impl Into<Arc<PodFacts>>) {
        let change = self.parts.books.apply_pod(pod.into());
        self.follow(change);
    }

    /// A pod as a read of our own shows it that was sent at `asked` on the ledger's clock
    /// ([`Ledger::copies`]). It counts if nothing newer came meanwhile: whole, even if the pod was
    /// bound before and is not any more, since the API server can be restored to an older state.
    pub fn read_back(&mut self, pod: PodFacts, asked: u64, now: Duration) {
        let change = self.parts.books.read_back(pod, asked, now);
        self.follow(change);
    }

    /// Bound pods of which only we know, by our own Binding or read, for so long that a watch should
    /// have shown them: to be read again.
    #[must_use]
    pub fn unconfirmed(&self, now: Duration) -> Vec<Arc<PodFacts>> {
        self.parts.books.unconfirmed(now)
    }

    /// A pod is gone. A filter call or a read that is late does not bring it back.
    pub fn delete_pod(&mut self, uid: &str) {
        let change = self.parts.books.delete_pod(uid);
        self.follow(change);
    }

    /// The whole list of pods, asked for at `began` on the ledger's clock ([`Ledger::copies`]). It wins over all that
    /// came before: a pod that it lacks is gone, and an unbound pod in it is unbound. For our own later actions and
    /// reads, the next list is the first to decide.
    pub fn reset_pods(&mut self, pods: Vec<Arc<PodFacts>>, began: u64) {
        for uid in self.parts.books.not_among(&pods, began) {
            self.delete_pod(&uid);
        }
        for pod in pods {
            let change = self.parts.books.apply_listed(pod, began);
            self.follow(change);
        }
        let change = self.parts.books.listed();
        self.follow(change);
    }

    /// A PodGroup as a watch shows it.
    pub fn apply_pod_group(&mut self, facts: PodGroupFacts) {
        let change = self.parts.books.apply_pod_group(facts);
        self.follow(change);
    }

    /// A PodGroup is gone.
    pub fn delete_pod_group(&mut self, group: &Group) {
        let change = self.parts.books.delete_pod_group(group);
        self.follow(change);
    }

    /// The whole list of PodGroups.
    pub fn reset_pod_groups(&mut self, pod_groups: Vec<PodGroupFacts>) {
        let listed = pod_groups.iter().map(|facts| facts.group.clone()).collect();
        for group in self.parts.books.pod_groups_beside(&listed) {
            self.delete_pod_group(&group);
        }
        for facts in pod_groups {
            self.apply_pod_group(facts);
        }
    }

    /// A disruption budget as a watch shows it.
    pub fn apply_budget(&mut self, budget: DisruptionBudget) {
        self.parts.books.apply_budget(budget);
    }

    /// A disruption budget is gone.
    pub fn delete_budget(&mut self, budget: &DisruptionBudget) {
        self.parts.books.delete_budget(budget);
    }

    /// The whole list of disruption budgets.
    pub fn reset_budgets(&mut self, budgets: Vec<DisruptionBudget>) {
        self.parts.books.reset_budgets(budgets);
    }

    /// Would the end of these break a disruption budget?
    #[must_use]
    pub fn breaks_budget<'p>(&self, pods: impl IntoIterator<Item = &'p Arc<PodFacts>>) -> bool {
        !self.parts.books.protected(pods).is_empty()
    }

    /// A node as a watch shows it.
    pub fn apply_node(&mut self, facts: NodeFacts) {
        let change = self.parts.books.apply_node(facts);
        self.follow(change);
    }

    /// A node is gone. Pods bound to it still count should it come back.
    pub fn delete_node(&mut self, name: &str) {
        self.means.defragment.forget(name);
        let change = self.parts.books.delete_node(name);
        self.follow(change);
    }

    /// The whole list of nodes.
    pub fn reset_nodes(&mut self, nodes: Vec<NodeFacts>) {
        let listed: HashSet<&str> = nodes.iter().map(|node| &*node.name).collect();
        let gone = self.parts.books.nodes_beside(&listed);
        drop(listed);
        gone.iter().for_each(|name| self.delete_node(name));
        nodes.into_iter().for_each(|node| self.apply_node(node));
    }

    /// A GpuNode as a watch shows it. It is fresh from `now` on if its content is new.
    pub fn apply_gpunode(&mut self, name: &str, status: GpuNodeStatus, now: Duration) {
        let known = self.parts.books.node(name).and_then(|node| node.status());
        let is_news = self.parts.config.reclaim && known != Some(&status);
        let change = self.parts.books.apply_gpunode(name, status, now);
        self.follow(change);
        if is_news {
            self.parts.now = now;
            let sight = self.parts.sight();
            self.means.reclaim.limits_mut().note(name, &sight);
        }
    }

    /// A GpuNode is gone.
    pub fn delete_gpunode(&mut self, name: &str) {
        let change = self.parts.books.delete_gpunode(name);
        self.follow(change);
        self.means.reclaim.limits_mut().forget(name);
    }

    /// The whole list of GpuNodes.
    pub fn reset_gpunodes(&mut self, gpunodes: Vec<(String, GpuNodeStatus)>, now: Duration) {
        let listed: HashSet<&str> = gpunodes.iter().map(|(name, _)| &**name).collect();
        let gone = self.parts.books.nodes_beside(&listed);
        drop(listed);
        gone.iter().for_each(|name| self.delete_gpunode(name));
        for (name, status) in gpunodes {
            self.apply_gpunode(&name, status, now);
        }
    }

    /// These pods, as they are here, could not be fenced when the epoch began. The call comes once the ledger has all
    /// earlier writes to pods, and before the first decision. Memory that an earlier epoch withheld is given back, and
    /// GPUs that it opened are closed.
    pub fn withhold(&mut self, pods: impl IntoIterator<Item = Arc<PodFacts>>) {
        let change = self.parts.books.withhold(pods);
        self.follow(change);
        self.close_all();
    }

    /// How many pods could not be fenced.
    #[must_use]
    pub fn unfenced(&self) -> usize {
        self.parts.books.unfenced()
    }

    /// Sets the time, in seconds since 1970, so that terminating pods can be late and starts can be over. To be called
    /// before each look.
    pub fn tell_time(&mut self, unix: i64) {
        self.parts.unix = Some(unix);
        let change = self.parts.books.tell_time(unix);
        self.follow(change);
    }

    /// The highest epoch that a pod carries.
    #[must_use]
    pub fn highest_epoch(&self) -> u64 {
        self.parts.books.highest_epoch()
    }
}
