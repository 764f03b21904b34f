//! The closeness of a node's cards to each other, from the report of its agent.

use std::sync::Arc;

use gpustow_pack::{Link, Links};

use crate::gpunode::{Gpu, GpuNodeStatus};

impl GpuNodeStatus {
    /// The links between the cards, in the order of `gpus`; none if no path is known. Instances of
    /// divided cards have none.
    #[must_use]
    pub fn links(&self) -> Option<Arc<Links>> {
        let near = |gpu: &Gpu| {
            gpu.place
                .as_ref()
                .is_some_and(|place| !place.near.is_empty())
        };
        if !self.gpus.iter().any(near) {
            return None;
        }
        Links::new(self.gpus.len(), |one, other| {
            let place = self.gpus.get(one)?.place.as_ref()?;
            let other = self.gpus.get(other)?;
            let whole = other
                .place
                .as_ref()
                .is_none_or(|place| place.parent.is_none());
            let mut near = place.near.iter().filter(|near| near.gpu == other.index);
            near.find_map(|near| link(&near.path)).filter(|_| whole)
        })
    }
}

/// The link that a path in the words of `nvidia-smi topo` means, if the path is known.
fn link(path: &str) -> Option<Link> {
    Some(match path {
        "PIX" => Link::PcieSwitch,
        "PXB" => Link::PcieSwitches,
        "PHB" => Link::HostBridge,
        "NODE" => Link::NumaNode,
        "SYS" => Link::System,
        _ => Link::NvLink(path.strip_prefix("NV")?.parse().ok()?),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gpunode::{Near, Place};

    /// A card with paths to others by index.
    fn gpu(index: u32, parent: Option<&str>, near: &[(u32, &str)]) -> Gpu {
        let near = near.iter().map(|&(gpu, path)| Near {
            gpu,
            path: path.to_owned(),
        });
        let place = Place {
            parent: parent.map(str::to_owned),
            near: near.collect(),
            ..Place::default()
        };
        Gpu {
            index,
            place: Some(Box::new(place)),
            ..Gpu::default()
        }
    }

    fn status(gpus: Vec<Gpu>) -> GpuNodeStatus {
        GpuNodeStatus {
            gpus,
            ..GpuNodeStatus::default()
        }
    }

    #[test]
    fn paths_are_read_in_either_direction_and_unknown_ones_passed_over() {
        let one = gpu(3, None, &[(4, "NV12"), (5, "NODE"), (9, "PIX")]);
        let status = status(vec![one, gpu(4, None, &[]), gpu(5, None, &[(4, "WARP")])]);
        let links = status.links().unwrap();
        assert_eq!(links.slowest(&[0, 1]), Some(Link::NvLink(12)));
        assert_eq!(links.slowest(&[2, 0]), Some(Link::NumaNode));
        assert_eq!(links.slowest(&[1, 2]), None, "a word of a later agent");
    }

    #[test]
    fn instances_of_divided_cards_have_no_links() {
        let near = &[(1, "PIX")];
        let nothing = status(vec![gpu(0, None, near), gpu(1, Some("GPU-1"), &[])]).links();
        assert_eq!(nothing, None);
        assert_eq!(
            status(vec![gpu(0, None, &[]), gpu(1, None, &[])]).links(),
            None
        );
    }
}
