//! What administrators set of the extender's decisions and disruptions. The extender parses it from its own command
//! line; the plugin reads it from the extender's pod. Both get the ledger's configuration from here, so that they give
//! the same answer.

mod container;
mod rights;

use std::str::FromStr;
use std::time::Duration;

use clap::ValueEnum;
use clap::builder::{PossibleValuesParser, TypedValueParser as _};
use gpustow_api::act::Act;
use gpustow_ledger::Config;
use gpustow_pack::PolicyKind;
use gpustow_serve::{Seconds, seconds};
use strum::VariantNames as _;

pub use rights::Right;

/// The flags that decide where pods go and which pods are disrupted for others.
#[derive(Clone, Debug, PartialEq, clap::Args)]
pub struct Settings {
    /// Packing policy for pods that name none: tight, binpack, spread or first-fit
    #[arg(help_heading = "Packing", long, env = "GPUSTOW_POLICY", default_value_t, value_parser = PolicyKind::from_str)]
    pub policy: PolicyKind,

    /// Seconds that a reservation waits for its bind
    #[arg(help_heading = "Binds", long, env = "GPUSTOW_RESERVATION_TTL", default_value_t = Seconds(Config::default().reservation_ttl))]
    pub reservation_ttl: Seconds,

    /// The same for pods with volumes or resource claims; keep it above kube-scheduler's
    /// bindTimeoutSeconds
    #[arg(help_heading = "Binds", long, env = "GPUSTOW_SLOW_RESERVATION_TTL", default_value_t = Seconds(Config::default().slow_reservation_ttl))]
    pub slow_reservation_ttl: Seconds,

    /// Seconds after which a GpuNode that does not change is stale: three heartbeats of the agent
    #[arg(help_heading = "Packing", long, env = "GPUSTOW_STALE_AFTER", default_value_t = Seconds(Config::default().stale_after))]
    pub stale_after: Seconds,

    /// Keep new pods that ask for GPU memory in line with a scheduling gate: off, auto (while others wait) or always;
    /// needs the component `line`
    #[arg(
        help_heading = "Queue",
        long,
        env = "GPUSTOW_LINE",
        value_enum,
        default_value_t
    )]
    pub line: LineMode,

    /// Let so many of the first in line through without room, so that an autoscaler sees them: it sees no gated pod
    #[arg(help_heading = "Queue", long, env = "GPUSTOW_LINE_SHOW", default_value_t = Config::default().line_show)]
    pub line_show: usize,

    /// Keep a place for a pod that has waited for so many seconds since it was created: what comes free there goes to
    /// nobody of equal or lower priority; or off
    #[arg(help_heading = "Reservations", long, env = "GPUSTOW_KEEP", value_name = "SECONDS", default_value = "off", value_parser = Keep::from_str)]
    pub keep: Keep,

    /// Seconds for which a place is waited for where no pod ends, before other GPUs are tried
    #[arg(help_heading = "Reservations", long, env = "GPUSTOW_KEEP_FOR", default_value_t = Seconds(Config::default().keep_for))]
    pub keep_for: Seconds,

    /// Places that are kept at a time, at most
    #[arg(help_heading = "Reservations", long, env = "GPUSTOW_KEEP_PLACES", default_value_t = Config::default().keep_places)]
    pub keep_places: usize,

    /// Of how many of the cluster's GPUs, in percent; a single place may be more
    #[arg(help_heading = "Reservations", long, env = "GPUSTOW_KEEP_PERCENT", default_value_t = Config::default().keep_percent)]
    pub keep_percent: usize,

    /// Mark the nodes on which places are kept, so that autoscalers let them be; needs the component `keep`
    #[arg(
        help_heading = "Reservations",
        long,
        env = "GPUSTOW_KEEP_MARKS",
        requires = "keep"
    )]
    pub keep_marks: bool,

    /// Call memory back that pods use beyond their requests where it keeps a pod off whose request fits
    #[arg(help_heading = "Reclaim", long, env = "GPUSTOW_CALL_BACK")]
    pub call_back: bool,

    /// What is done to have a pod give memory back, unless its owner softens it: event, kill-process (its
    /// agent must let that) or evict (a right of its own)
    #[arg(help_heading = "Reclaim", long, env = "GPUSTOW_ACT", default_value_t, value_parser = PossibleValuesParser::new(Act::VARIANTS).try_map(|word| Act::from_str(&word)))]
    pub act: Act,

    /// Do to every pod what --act says: the annotation gpustow.dev/act of a pod does not soften it
    #[arg(
        help_heading = "Reclaim",
        long,
        env = "GPUSTOW_IGNORE_POD_ACT",
        requires = "call_back"
    )]
    pub ignore_pod_act: bool,

    /// Seconds for which memory that is called back is waited for, beyond the time that its users have to
    /// end, before another GPU is tried
    #[arg(help_heading = "Reclaim", long, env = "GPUSTOW_CALL_BACK_FOR", default_value_t = Seconds(Config::default().call_back_for))]
    pub call_back_for: Seconds,

    /// With --call-back: seconds for which a pod may use more than its limit before it is to give memory back
    #[arg(help_heading = "Reclaim", long, env = "GPUSTOW_OVER_LIMIT_FOR", default_value_t = Seconds(Config::default().over_limit_for))]
    pub over_limit_for: Seconds,

    /// Preempt pods of lower priority for a pod that free memory is too scattered for; needs the component
    /// `preempt-scattered`
    #[arg(
        help_heading = "Preemption and moves",
        long,
        env = "GPUSTOW_PREEMPT_SCATTERED"
    )]
    pub preempt_scattered: bool,

    /// Move so many pods an hour at most, of those whose owners let them be moved, for pods that wait for memory which
    /// is free in pieces; 0: none. Needs the component `move`
    #[arg(
        help_heading = "Preemption and moves",
        long = "move",
        env = "GPUSTOW_MOVE",
        value_name = "PER_HOUR",
        default_value_t = 0
    )]
    pub moves: u32,
}

/// Whether pods stand in line.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum LineMode {
    /// Nobody does; whoever bears our gate is let go.
    #[default]
    Off,
    /// New pods do while others wait for room.
    Auto,
    /// Every new pod does.
    Always,
}

/// After how long a place is kept for a pod that waits, if at all.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Keep(pub Option<Duration>);

impl FromStr for Keep {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "off" => Ok(Self(None)),
            _ => match seconds(text) {
                Ok(after) => Ok(Self(Some(after))),
                Err(error) => Err(format!("{error}; or write off")),
            },
        }
    }
}

impl Default for Settings {
    /// What the flags say when none is given.
    fn default() -> Self {
        let config = Config::default();
        Self {
            policy: config.policy,
            reservation_ttl: Seconds(config.reservation_ttl),
            slow_reservation_ttl: Seconds(config.slow_reservation_ttl),
            stale_after: Seconds(config.stale_after),
            line: LineMode::default(),
            line_show: config.line_show,
            keep: Keep::default(),
            keep_for: Seconds(config.keep_for),
            keep_places: config.keep_places,
            keep_percent: config.keep_percent,
            keep_marks: false,
            call_back: config.call_back,
            act: Act::default(),
            ignore_pod_act: false,
            call_back_for: Seconds(config.call_back_for),
            over_limit_for: Seconds(config.over_limit_for),
            preempt_scattered: config.preempt_scattered,
            moves: 0,
        }
    }
}

impl Settings {
    /// The ledger's part. No field is left out by a default: one that no flag sets is named here.
    #[must_use]
    pub fn ledger(&self) -> Config {
        let fixed = Config::default();
        Config {
            policy: self.policy,
            stale_after: self.stale_after.0,
            reservation_ttl: self.reservation_ttl.0,
            slow_reservation_ttl: self.slow_reservation_ttl.0,
            wake_again_after: fixed.wake_again_after,
            claim_ttl: fixed.claim_ttl,
            call_back: self.call_back,
            action: self.act,
            owners_soften: !self.ignore_pod_act,
            call_back_for: self.call_back_for.0,
            over_limit_for: self.over_limit_for.0,
            line: self.line != LineMode::Off,
            line_show: self.line_show,
            lift_for: fixed.lift_for,
            keep: self.keep.0,
            keep_for: self.keep_for.0,
            keep_places: self.keep_places,
            keep_percent: self.keep_percent,
            preempt_scattered: self.preempt_scattered,
            moves: self.moves > 0,
            least_nodes: fixed.least_nodes,
            search_steps: fixed.search_steps,
        }
    }
}
