//! What a switch may do beyond the base installation, and which manifests give that right.

use gpustow_api::act::Act;
use gpustow_api::names;
use k8s_openapi::api::authorization::v1::ResourceAttributes;

use crate::{LineMode, Settings};

/// A right that a switch needs and the base installation does not give.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Right {
    /// The switch, as it is written.
    pub switch: &'static str,
    /// The folder below `manifests` that gives the right.
    pub component: &'static str,
    verb: &'static str,
    resource: &'static str,
    subresource: Option<&'static str>,
    /// Of one object in gpustow's own namespace; None: everywhere.
    name: Option<&'static str>,
}

impl Right {
    /// To remove the scheduling gate.
    pub const LIFT: Self = Self {
        switch: "--line",
        component: "line",
        verb: "patch",
        resource: "pods",
        subresource: None,
        name: None,
    };
    /// To say that new pods get it.
    pub const FLAG: Self = Self {
        resource: "configmaps",
        name: Some(names::LINE),
        ..Self::LIFT
    };
    /// To mark nodes for autoscalers.
    pub const MARK: Self = Self {
        switch: "--keep-marks",
        component: "keep",
        verb: "patch",
        resource: "nodes",
        subresource: None,
        name: None,
    };
    /// To evict pods that keep memory which is reclaimed.
    pub const RECLAIM: Self = Self {
        switch: "--act=evict",
        component: "evict",
        verb: "create",
        resource: "pods",
        subresource: Some("eviction"),
        name: None,
    };
    /// To delete pods of lower priority.
    pub const PREEMPT: Self = Self {
        switch: "--preempt-scattered",
        component: "preempt-scattered",
        verb: "delete",
        resource: "pods",
        subresource: None,
        name: None,
    };
    /// To evict pods that are moved.
    pub const MOVE: Self = Self {
        switch: "--move",
        component: "move",
        ..Self::RECLAIM
    };

    /// Every right that a switch may need.
    pub const ALL: [Self; 6] = [
        Self::LIFT,
        Self::FLAG,
        Self::MARK,
        Self::RECLAIM,
        Self::PREEMPT,
        Self::MOVE,
    ];

    /// What the API server is asked.
    #[must_use]
    pub fn attributes(&self) -> ResourceAttributes {
        ResourceAttributes {
            verb: Some(self.verb.to_owned()),
            resource: Some(self.resource.to_owned()),
            subresource: self.subresource.map(str::to_owned),
            name: self.name.map(str::to_owned),
            namespace: self.name.map(|_| names::NAMESPACE.to_owned()),
            ..ResourceAttributes::default()
        }
    }

    /// `patch pods`, for people.
    #[must_use]
    pub fn text(&self) -> String {
        let subresource = self.subresource.map(|it| format!("/{it}"));
        let name = self.name.map(|it| format!(" {it}"));
        let [subresource, name] = [subresource, name].map(Option::unwrap_or_default);
        format!("{} {}{subresource}{name}", self.verb, self.resource)
    }
}

impl Settings {
    /// The rights that these settings need beyond the base installation.
    #[must_use]
    pub fn rights(&self) -> Vec<Right> {
        let line = self.line != LineMode::Off;
        let needs = |right: &Right| match right.component {
            "line" => line,
            "keep" => self.keep_marks,
            "evict" => self.act == Act::Evict,
            "preempt-scattered" => self.preempt_scattered,
            "move" => self.moves > 0,
            _ => false,
        };
        Right::ALL.into_iter().filter(needs).collect()
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::time::Duration;

    use super::*;
    use crate::Keep;

    #[test]
    fn a_switch_needs_the_right_that_its_component_gives() {
        let manifests = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../manifests");
        let base = Settings::default();
        assert_eq!(base.rights(), []);
        let evicts = Settings {
            call_back: true,
            act: Act::Evict,
            ..base.clone()
        };
        let marks = Settings {
            keep: Keep(Some(Duration::from_secs(60))),
            keep_marks: true,
            ..base.clone()
        };
        let queues = Settings {
            line: LineMode::Auto,
            ..base.clone()
        };
        let preempts = Settings {
            preempt_scattered: true,
            ..base.clone()
        };
        let moves = Settings { moves: 1, ..base };
        for (settings, component, count) in [
            (queues, "line", 2),
            (marks, "keep", 1),
            (evicts, "evict", 1),
            (preempts, "preempt-scattered", 1),
            (moves, "move", 1),
        ] {
            let rights = settings.rights();
            assert_eq!(rights.len(), count, "{rights:?}");
            let file = manifests.join(component).join("rbac.yaml");
            let text = std::fs::read_to_string(&file).unwrap();
            for right in rights {
                assert_eq!(right.component, component);
                let subresource = right.subresource.map(|it| format!("/{it}"));
                let resource = right.resource.to_owned() + &subresource.unwrap_or_default();
                assert!(
                    text.contains(&format!("resources: [{resource}]")),
                    "{right:?}"
                );
                assert!(text.contains(right.verb), "{right:?}");
                assert!(text.contains(right.name.unwrap_or_default()), "{right:?}");
            }
        }
    }
}
