//! Problems that need a person's attention.

use std::collections::BTreeMap;
use std::sync::Arc;

use gpustow_api::{Assignment, PodFacts};
use gpustow_books::Node;
use gpustow_pack::Mib;
use strum::{IntoStaticStr, VariantNames};

use crate::Ledger;

/// No UUID is longer.
const MAX_UUID: usize = 96;
/// The most entries of a list that are reported.
const MAX_UNKNOWN: usize = 8;

/// Something that the ledger had to work around.
#[derive(Clone, Debug, PartialEq, Eq, IntoStaticStr, VariantNames)]
#[strum(serialize_all = "snake_case")]
pub enum Problem {
    /// A pod that asks for GPU memory was bound around us: it holds no card.
    Unassigned {
        /// `namespace/name`.
        pod: String,
    },
    /// A pod's assignment cannot be read: it is charged on every card.
    Broken {
        /// `namespace/name`.
        pod: String,
        /// The error in the assignment.
        error: String,
    },
    /// A pod holds a card that the node no longer has.
    CardGone {
        /// `namespace/name`.
        pod: String,
        /// The missing card.
        uuid: String,
    },
    /// More is promised on a card than it has, by a change that we did not make.
    Overcommitted {
        /// The card.
        uuid: String,
        /// The promised memory.
        held: Mib,
        /// The card's capacity.
        capacity: Mib,
    },
    /// A pod's assignment does not match its request.
    Forged {
        /// `namespace/name`.
        pod: String,
    },
    /// Another node reports a card of the same UUID.
    Twice {
        /// The card.
        uuid: String,
        /// The other node.
        other: Arc<str>,
    },
    /// A node's list of cordoned GPUs has something that is no GPU of the node.
    UnknownCordon {
        /// As it is written, or its beginning.
        gpu: String,
    },
}

impl Ledger {
    /// The problems of one node; [`crate::twice`] adds the problems between nodes.
    pub(crate) fn problems(&self, node: &Node) -> Vec<Problem> {
        let mut uids: Vec<_> = node.bound().iter().collect();
        uids.sort_unstable_by_key(|(uid, _)| *uid);
        let mut problems = Vec::new();
        for (uid, hold) in uids {
            let Some(facts) = self.parts.books.pod(uid) else {
                continue;
            };
            let pod = || format!("{}/{}", facts.namespace, facts.name);
            match &facts.assignment {
                Some(Ok(assignment)) if is_forged(facts, assignment) => {
                    problems.push(Problem::Forged { pod: pod() });
                }
                Some(Err(broken)) => {
                    problems.push(Problem::Broken {
                        pod: pod(),
                        error: broken.to_string(),
                    });
                }
                None if facts.requests_memory() => {
                    problems.push(Problem::Unassigned { pod: pod() });
                }
                _ => {}
            }
            if node.status().is_some() {
                let has = |uuid: &str| node.gpus().iter().any(|gpu| *gpu.uuid == *uuid);
                let missing = hold.cards().filter(|uuid| !has(uuid));
                problems.extend(missing.map(|uuid| Problem::CardGone {
                    pod: pod(),
                    uuid: uuid.to_owned(),
                }));
            }
        }
        for (index, card) in node.view().cards.iter().enumerate() {
            let uuid = node.uuid(index);
            let held = node.promised(uuid);
            if held > card.capacity {
                let (uuid, capacity) = (uuid.to_owned(), card.capacity);
                problems.push(Problem::Overcommitted {
                    uuid,
                    held,
                    capacity,
                });
            }
        }
        problems.extend(unknown_cordons(node));
        problems
    }
}

/// Entries of the node's list of cordoned GPUs that cordon none, of very many the first.
fn unknown_cordons(node: &Node) -> Vec<Problem> {
    let Some(facts) = node.facts().filter(|_| node.status().is_some()) else {
        return Vec::new();
    };
    let is_here = |uuid: &str| {
        node.gpus().iter().any(|gpu| {
            let parent = gpu.place.as_ref().and_then(|it| it.parent.as_deref());
            *gpu.uuid == *uuid || parent == Some(uuid)
        })
    };
    let listed = facts.cordoned_gpus.iter();
    let unknown = listed.filter(|uuid| !is_here(uuid)).take(MAX_UNKNOWN);
    let told = unknown.map(|uuid| Problem::UnknownCordon {
        gpu: uuid.chars().take(MAX_UUID).collect(),
    });
    told.collect()
}

/// Is this an assignment that the pod's request cannot have led to? A whole card may be any that is
/// large enough, and so may one of which a percentage is asked for, or a MIG instance.
fn is_forged(facts: &PodFacts, assignment: &Assignment) -> bool {
    let Ok(request) = facts.asks.readable() else {
        return false;
    };
    let exclusive = assignment.exclusive.unwrap_or(request.exclusive);
    let mut asked: BTreeMap<&str, Mib> = BTreeMap::new();
    for (claim, name) in request.claims.iter().zip(&*facts.containers) {
        let sees = assignment.containers.iter().find(|(it, _)| it == name);
        let sees = sees.map_or(&[][..], |(_, uuids)| uuids);
        if sees.len() != claim.gpus as usize {
            return true;
        }
        for uuid in sees {
            let sum = asked.entry(uuid).or_default();
            *sum = Mib(sum.0.saturating_add(claim.mib.0));
            let charged = assignment.charges.iter().find(|(it, _)| it == uuid);
            if charged.is_none_or(|(_, charged)| *charged < claim.mib) {
                return true;
            }
        }
    }
    let by_the_gpu = exclusive || request.is_relative() || assignment.instance.is_some();
    let more = |(uuid, charged): &(Arc<str>, Mib)| {
        let asked = asked.get(&**uuid);
        asked.is_none_or(|asked| !by_the_gpu && charged > asked)
    };
    assignment.containers.len() != request.claims.len() || assignment.charges.iter().any(more)
}
