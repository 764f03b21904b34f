//! MIG instances that agents make for pods: where the one of a placement lies, and whether it may still be made.

use gpustow_api::Assignment;
use gpustow_api::assignment::Instance;
use gpustow_pack::Placement;
use gpustow_pack::mig::Piece;

use super::node::Node;

impl Node {
    /// The instance that a placement chose, by its profile's name; none if the agent does not report that profile any more.
    pub(super) fn instance(&self, placement: &Placement, piece: &Piece) -> Option<Instance> {
        let (card, _) = placement.charges.first()?;
        let mig = self.gpus().get(*card)?.mig.as_ref()?;
        Some(Instance {
            profile: mig.name(piece.profile)?.into(),
            start: piece.start,
            slices: piece.profile.slices,
        })
    }

    /// Can this pod's instance be made on the card, next to the instances of all other pods?
    pub(super) fn may_make(&self, uuid: &str, uid: &str, assignment: &Assignment) -> bool {
        let gpu = self.gpus().iter().find(|gpu| *gpu.uuid == *uuid);
        let Some((gpu, wanted)) = gpu.zip(assignment.instance.as_ref()) else {
            return false;
        };
        let profile = gpu
            .mig
            .as_ref()
            .and_then(|mig| mig.profile(&wanted.profile));
        let is_legal = profile.is_some_and(|profile| {
            profile.slices == wanted.slices && profile.starts.contains(&wanted.start)
        });
        let others = self.slices_of(gpu, |it| it != uid);
        let is_free = others.is_some_and(|it| (it.blocked | it.taken) & wanted.mask() == 0);
        is_legal && is_free
    }
}
