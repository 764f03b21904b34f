//! Nominations by kube-scheduler, whose victims are to leave, and nominations by the extender.
//!
//! kube-scheduler may show the extender only some of the nodes that pass its own filters. A pod that is refused on all
//! of these may fit on another node. The pod is woken for that node, and the same write nominates it there, since
//! kube-scheduler tries a nominated node before all others. The extender ends its own nomination when the room is not
//! promised to the pod any more: kube-scheduler would go on to reserve CPU and memory there.
//!
//! A nomination keeps room only for a time: kube-scheduler does not end one whose pod cannot use the node.

use std::sync::Arc;
use std::time::Duration;

use gpustow_api::PodFacts;

use super::{Earmarks, Ended, Holder};
use crate::books::{Books, Uid};
use crate::maps::HashMap;

/// A nomination keeps room for so long beyond the grace period of the pods that terminate there...
const LASTS: Duration = Duration::from_secs(300);
/// ... of which so much counts at most.
const LONGEST_GRACE: Duration = Duration::from_secs(3600);
/// Between two looks at nominations.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// A pod that is nominated.
#[derive(Debug)]
struct Nomination {
    node: Arc<str>,
    own: bool,
    /// When it was first looked at, and until when it keeps room.
    lasts: Option<(Duration, Duration)>,
    is_over: bool,
}

/// Unbound pods that are nominated.
#[derive(Debug, Default)]
pub(super) struct Nominations {
    pods: HashMap<Uid, Nomination>,
    next_look: Duration,
}

impl Nominations {
    /// A pod has come, changed or gone.
    pub(super) fn follow(&mut self, uid: &Uid, new: Option<&PodFacts>) {
        let new = new.filter(|pod| pod.node.is_none() && !pod.released);
        let Some((pod, node)) = new.and_then(|pod| Some((pod, pod.nominated.as_ref()?))) else {
            self.pods.swap_remove(uid);
            return;
        };
        match self.pods.get_mut(uid) {
            Some(known) if known.node == *node => known.own = pod.own_nomination,
            _ => {
                let nomination = Nomination {
                    node: node.clone(),
                    own: pod.own_nomination,
                    lasts: None,
                    is_over: false,
                };
                self.pods.insert(uid.clone(), nomination);
            }
        }
    }

    /// Is the pod nominated?
    pub(super) fn has(&self, uid: &str) -> bool {
        self.pods.contains_key(uid)
    }

    /// Has the pod been nominated for so long that no room is kept for that?
    pub(super) fn is_over(&self, uid: &str) -> bool {
        self.pods.get(uid).is_some_and(|known| known.is_over)
    }

    /// The nominated pods whose time is over since the last look, and their nodes.
    fn tick(&mut self, books: &Books, now: Duration) -> Vec<(Uid, Arc<str>)> {
        if now < self.next_look {
            return Vec::new();
        }
        self.next_look = now + LOOK_EVERY;
        let mut over = Vec::new();
        for (uid, known) in self.pods.iter_mut().filter(|(_, known)| !known.is_over) {
            let bound = books.node(&known.node).map(|node| node.bound().keys());
            let leaving = bound.into_iter().flatten();
            let leaving = leaving
                .filter_map(|uid| books.pod(uid))
                .filter(|pod| pod.deleting);
            let grace = leaving
                .map(|pod| Duration::from_secs(pod.grace.into()))
                .max();
            let grace = grace.unwrap_or_default().min(LONGEST_GRACE);
            let (since, until) = known.lasts.unwrap_or((now, now));
            let until = until.max(since + grace + LASTS);
            known.lasts = Some((since, until));
            if now >= until {
                known.is_over = true;
                over.push((uid.clone(), known.node.clone()));
            }
        }
        over
    }
}

impl Earmarks {
    /// Is the pod nominated, and not for so long that no room is kept for that?
    pub fn is_nominated(&self, pod: &PodFacts) -> bool {
        pod.nominated.is_some() && !self.nominations.is_over(&pod.uid)
    }

    /// Nominations that have lasted too long keep no room.
    pub(super) fn end_nominations(&mut self, books: &Books, now: Duration) {
        for (uid, node) in self.nominations.tick(books, now) {
            self.end(&uid, Ended::Late, books);
            self.unindex(&Holder::Pod(uid), &node);
        }
    }

    /// Pods that the extender nominated, and that are not assumed.
    pub fn own_nominations<'s>(
        &'s self,
        books: &'s Books,
    ) -> impl Iterator<Item = &'s Arc<PodFacts>> {
        let own = self.nominations.pods.iter();
        let own = own.filter(|(uid, known)| known.own && books.assumed(uid).is_none());
        own.filter_map(|(uid, _)| books.pod(uid))
    }
}
