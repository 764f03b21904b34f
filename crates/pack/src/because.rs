//! One sentence about a placement, for people.

use crate::{Mib, NodeGpus, PolicyKind, Request, Tight};

/// Why to put `charges` (card index, MiB; ascending, each card once) on `node`, as the policy sees it: its rule and its
/// finding, in MiB.
#[must_use]
pub fn because(
    node: &NodeGpus,
    request: &Request,
    charges: &[(usize, Mib)],
    policy: PolicyKind,
    tight: &Tight,
) -> String {
    let cards: Vec<usize> = charges.iter().map(|&(card, _)| card).collect();
    let known = || {
        charges
            .iter()
            .filter_map(|&(card, mib)| Some((node.cards.get(card)?, mib)))
    };
    if known().count() < charges.len() {
        return String::new();
    }
    let left: Mib = known().map(|(card, mib)| card.free.minus(mib)).sum();
    let size: Mib = known().map(|(card, _)| card.capacity).sum();
    let gpus = match cards.len() {
        1 => "its GPU".to_owned(),
        several => format!("its {several} GPUs"),
    };
    let found = match policy {
        PolicyKind::Tight if !request.isolated => tight.found(node, request, charges) + "; ",
        _ => String::new(),
    };
    let linked = node.links.as_ref().filter(|_| cards.len() > 1);
    let linked = linked.and_then(|links| links.slowest(&cards));
    let linked = linked.map_or_else(String::new, |link| format!(", joined by {}", link.text()));
    format!(
        "{policy} ({}): {found}{} of {size} stay free on {gpus}{linked}",
        policy.rule(),
        left.0
    )
}
