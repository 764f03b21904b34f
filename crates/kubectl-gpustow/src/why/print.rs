//! [`Why`] as text.

use std::io::Write;

use anyhow::Result;
use gpustow_inspect::{age, memory};
use gpustow_pack::Mib;

use super::{Count, Verdict, Why};
use crate::output::{Format, printable, write_value};

impl Why {
    /// Prints it as text, JSON or YAML.
    pub(crate) fn print(&self, format: Format, out: &mut dyn Write) -> Result<()> {
        if !matches!(format, Format::Table | Format::Wide) {
            return write_value(self, format, out);
        }
        let name = match self.namespace.as_str() {
            "" => self.pod.clone(),
            namespace => format!("{namespace}/{}", self.pod),
        };
        let name = printable(&name);
        match self.kind {
            "Fit" => writeln!(out, "Pod {name}")?,
            _ => writeln!(
                out,
                "Pod {name}, {} old: {:?}",
                age(self.age_seconds),
                self.verdict
            )?,
        }
        if !self.asks.is_empty() {
            writeln!(out, "  asks for {}", printable(&self.asks.join("; ")))?;
        }
        writeln!(out, "\n{}", printable(&self.summary))?;
        if let Some(place) = &self.place {
            for gpu in &place.gpus {
                let (held, room) = (memory(gpu.requested), memory(gpu.room));
                writeln!(
                    out,
                    "  {held} on GPU {} of {}; {room} stays free there",
                    gpu.gpu, place.node
                )?;
            }
            if let (Some(because), Format::Wide) = (&place.because, format) {
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
        }
        match (&self.place, self.refusals.as_slice()) {
            (_, []) => {}
            (Some(_), _) => writeln!(out, "\nOther nodes:")?,
            (None, _) => writeln!(out, "\nNodes:")?,
        }
        for Count { nodes, reason } in &self.refusals {
            writeln!(out, "  {nodes:>5}  {reason}")?;
        }
        if !self.nearest.is_empty() {
            writeln!(out, "\nNearest GPUs:")?;
        }
        for near in &self.nearest {
            let lacks = match (&near.refuses, near.no_limit, near.lacks) {
                (Some(why), ..) => format!("takes no pods: {}", printable(why)),
                (None, Some(why), _) => format!("cannot limit memory: {why}"),
                (None, None, Mib::ZERO) => {
                    "has enough memory, but its node has too few GPUs like it".to_owned()
                }
                (None, None, lacks) => format!("{} short", memory(lacks)),
            };
            let freed = match near.freed_by.as_slice() {
                [] => String::new(),
                pods => format!("; fits once {} ends", pods.join(" and ")),
            };
            let room = memory(near.room);
            let line = format!("{} GPU {} ({})", near.node, near.gpu, near.model);
            writeln!(
                out,
                "  {}: {room} free, {lacks}{}",
                printable(&line),
                printable(&freed)
            )?;
        }
        for unknown in &self.unknown {
            writeln!(out, "\nNote: {}", printable(unknown))?;
        }
        if let Some(said) = &self.scheduler_said {
            writeln!(out, "\nkube-scheduler said: {}", printable(said))?;
        }
        Ok(())
    }
}
