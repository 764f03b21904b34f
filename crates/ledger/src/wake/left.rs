//! The room that is left on a node, and the cost of the question whether a pod fits there.

use gpustow_api::PodFacts;
use gpustow_books::{Budget, Host, Left, Trial};
use gpustow_means::Sight;

/// The cost of a fit of a pod with one container.
const FIT: usize = 8;

/// Would the pod fit in the room that is left on the node?
pub(super) fn fits(sight: &Sight<'_>, name: &str, left: &Left, pod: &PodFacts) -> bool {
    let mut trial = sight.trial().with(name, left);
    trial.fits(pod, name, Host::Whole, &mut Budget::all()) == Some(true)
        && (!sight.earmarks.has_earmarks(name) || sight.choose(name, pod).is_ok())
}

/// A node's room less the room that is offered there; `None` if no pod may go there.
pub(super) fn unoffered(sight: &Sight<'_>, name: &str) -> Option<Left> {
    sight.check(name).ok()?;
    let mut trial = sight.trial().while_others_start().keeping_nothing();
    let offered = sight.offered.on(name).iter();
    // Kept room is looked at on its own.
    let offered = offered.filter(|uid| !sight.earmarks.has_more_than_reservation(uid));
    for pod in offered.filter_map(|uid| sight.books.pod(uid)) {
        come(&mut trial, name, pod);
    }
    trial.left_for_all(name)
}

/// The room that is left once the pod has come, too.
pub(super) fn left_beside(
    sight: &Sight<'_>,
    name: &str,
    left: &Left,
    pod: &PodFacts,
) -> Option<Left> {
    let mut trial = sight.trial().with(name, left);
    come(&mut trial, name, pod);
    trial.left_for_all(name)
}

/// The pod comes, if there is room for it.
fn come(trial: &mut Trial<'_>, name: &str, pod: &PodFacts) {
    if let Ok(choice) = trial.fit(pod, name, None, Host::Beside, &mut Budget::all()) {
        trial.take(pod, name, &choice.placement.charges);
    }
}

/// The cost of a fit of this pod.
pub(super) fn price(pod: &PodFacts) -> usize {
    FIT * pod.containers.len().max(1).pow(2)
}
