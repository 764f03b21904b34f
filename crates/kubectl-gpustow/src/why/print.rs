//! [`Why`] as text.

use std::io::Write;

use anyhow::Result;
use gpustow_inspect::owner::Holder;
use gpustow_inspect::{age, memory};
use gpustow_pack::Mib;

use super::gang::Gang;
use super::location::Location;
use super::nearest::Near;
use super::report::Means;
use super::{Verdict, Why};
use crate::output::{Format, printable, write_value};

/// Pods that are named one by one.
const NAMED: usize = 3;

impl Why {
    /// Prints it as text, JSON or YAML.
    pub(crate) fn print(&self, format: &Format, out: &mut dyn Write) -> Result<()> {
        if !matches!(format, Format::Table | Format::Wide) {
            return write_value(self, format, out);
        }
        self.print_head(out)?;
        if let Some(place) = &self.place {
            self.print_place(place, matches!(format, Format::Wide), out)?;
        }
        self.print_nodes(out)?;
        if let Some(gang) = &self.gang {
            print_gang(gang, out)?;
        }
        self.print_means(out)?;
        for said in self.reserved.iter().chain(&self.events) {
            let passed = age(said.age_seconds);
            let text = format!("Event {}, {passed} ago: {}", said.event, said.note);
            writeln!(out, "\n{}", printable(&text))?;
        }
        for unknown in &self.unknown {
            writeln!(out, "\nNote: {}", printable(unknown))?;
        }
        if let Some(said) = &self.scheduler_said {
            writeln!(out, "\nkube-scheduler's answer: {}", printable(said))?;
        }
        if let Some(left_out) = self.left_out {
            writeln!(out, "\nLeft out: {left_out}")?;
        }
        Ok(())
    }

    /// The pod, its request, and the sentence about it.
    fn print_head(&self, out: &mut dyn Write) -> Result<()> {
        let name = match self.namespace.as_str() {
            "" => self.pod.clone(),
            namespace => format!("{namespace}/{}", self.pod),
        };
        let name = printable(&name);
        let age = age(self.age_seconds);
        match self.kind {
            "Fit" => writeln!(out, "Pod {name}")?,
            _ => writeln!(out, "Pod {name}, {age} old: {:?}", self.verdict)?,
        }
        let asks = self.asks.parts();
        if !asks.is_empty() {
            writeln!(out, "  asks for {}", printable(&asks.join("; ")))?;
        }
        Ok(writeln!(out, "\n{}", printable(&self.summary))?)
    }

    /// The GPUs on which the pod is, or would be.
    fn print_place(&self, place: &Location, wide: bool, out: &mut dyn Write) -> Result<()> {
        for gpu in &place.gpus {
            let (held, room) = (memory(gpu.requested), memory(gpu.room));
            writeln!(
                out,
                "  {held} on GPU {} of {}; {room} stays free there",
                gpu.gpu, place.node
            )?;
        }
        if let Some(because) = place.because.as_ref().filter(|_| wide) {
            let when = match self.verdict {
                Verdict::Running => "As things are now without it, by policy ",
                _ => "By policy ",
            };
            writeln!(out, "  {when}{}", printable(because))?;
        }
        if let Some(refuses) = place.refuses {
            let since = place.agent_age_seconds.map(age);
            let since = since.map_or_else(String::new, |age| format!(" for {age}"));
            writeln!(out, "  No new pod goes to that node: {refuses}{since}.")?;
        }
        Ok(())
    }

    /// Why nodes refuse the pod, and the GPUs that nearly take it.
    fn print_nodes(&self, out: &mut dyn Write) -> Result<()> {
        match (&self.place, self.refusals.as_slice()) {
            (_, []) => {}
            (Some(_), _) => writeln!(out, "\nOther nodes:")?,
            (None, _) => writeln!(out, "\nNodes:")?,
        }
        for it in &self.refusals {
            let causes = printable(&listed(&it.causes));
            let colon = if causes.is_empty() { "" } else { ": " };
            writeln!(out, "  {:>5}  {}{colon}{causes}", it.nodes, it.reason)?;
        }
        if !self.nearest.is_empty() {
            writeln!(out, "\nNearest GPUs:")?;
        }
        for (near, more) in grouped(&self.nearest) {
            let line = format!("{} GPU {} ({})", near.node, near.gpu, near.model);
            let more = match more {
                0 => String::new(),
                more => format!(" and {more} more"),
            };
            let text = format!("{line}{more}: {}", state(near));
            writeln!(out, "  {}", printable(&text))?;
        }
        Ok(())
    }

    /// Whose end or eviction would make room for the pod.
    fn print_means(&self, out: &mut dyn Write) -> Result<()> {
        if let Some(finish) = &self.fewest_to_finish {
            let count = match finish.pods.len() {
                1 => "1 pod finishes".to_owned(),
                count => format!("{count} pods finish"),
            };
            let text = format!(
                "GPU memory suffices on {} once {count}, the fewest of all nodes: {}",
                finish.node,
                listed(&finish.pods)
            );
            writeln!(out, "\n{}", printable(&text))?;
        }
        if !self.means.is_empty() {
            writeln!(out, "\nTo make room for it:")?;
        }
        for Means { means, does } in &self.means {
            writeln!(out, "  {means:<10}  {}", printable(does))?;
        }
        Ok(())
    }
}

fn print_gang(gang: &Gang, out: &mut dyn Write) -> Result<()> {
    let text = format!(
        "Group {} needs {} pods at the same time; {} fit:",
        gang.group, gang.min_count, gang.fit
    );
    writeln!(out, "\n{}", printable(&text))?;
    for part in &gang.parts {
        let text = format!("{}: {}", part.what, listed(&part.pods));
        writeln!(out, "  {:>5}  {}", part.pods.len(), printable(&text))?;
    }
    Ok(())
}

/// The description of a GPU, without its name.
fn state(near: &Near) -> String {
    let lacks = match (&near.refuses, near.no_limit, near.lacks) {
        (Some(why), ..) => format!("takes no pods: {why}"),
        (None, Some(why), _) => format!("cannot limit memory: {why}"),
        (None, None, Mib::ZERO) => {
            "has enough memory, but its node has too few GPUs like it".to_owned()
        }
        (None, None, lacks) => format!("{} short", memory(lacks)),
    };
    let freed = match near.freed_by.as_slice() {
        [] => String::new(),
        pods => {
            let names = pods.iter().map(|it| {
                let held = Mib(it.bytes.unwrap_or_default() >> 20);
                format!(
                    "{} ({})",
                    it.pod.as_deref().unwrap_or_default(),
                    memory(held)
                )
            });
            let names: Vec<_> = names.collect();
            format!("; fits once {} ends", names.join(" and "))
        }
    };
    let others: Vec<_> = near.others.iter().map(Holder::to_string).collect();
    let others = match others.as_slice() {
        [] => String::new(),
        others => format!("; not gpustow's: {}", listed(others)),
    };
    format!("{} free, {lacks}{freed}{others}", memory(near.room))
}

/// GPUs with equal descriptions: the first, and the number of the others.
fn grouped(all: &[Near]) -> Vec<(&Near, usize)> {
    let mut groups: Vec<(&Near, usize)> = Vec::new();
    for near in all {
        let same = |(first, _): &&mut (&Near, usize)| {
            first.model == near.model && state(first) == state(near)
        };
        match groups.iter_mut().find(same) {
            Some((_, more)) => *more += 1,
            None => groups.push((near, 0)),
        }
    }
    groups
}

/// The first few names, and how many more.
pub(super) fn listed(names: &[String]) -> String {
    let (first, more) = names.split_at(names.len().min(NAMED));
    match more.len() {
        0 => first.join(", "),
        more => format!("{} and {more} more", first.join(", ")),
    }
}
