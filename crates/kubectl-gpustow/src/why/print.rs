//! [`Why`] as text.

use std::io::Write;

use anyhow::Result;
use gpustow_pack::Mib;

use super::{Count, Verdict, Why};
use crate::cluster::SILENT_AFTER;
use crate::output::{Format, age, memory, printable, write_value};

impl Why {
    /// Prints it as text, JSON or YAML.
    pub(crate) fn print(&self, format: Format, out: &mut dyn Write) -> Result<()> {
        if format != Format::Table {
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
                    "  {} GPU {}: {held}, which leaves {room}",
                    place.node, gpu.gpu
                )?;
            }
            if let Some(because) = &place.because {
                let when = match self.verdict {
                    Verdict::Running => "As things are now without it, by policy ",
                    _ => "By policy ",
                };
                writeln!(out, "  {when}{}", printable(because))?;
            }
            if let Some(silent) = place.agent_age_seconds.filter(|age| *age > SILENT_AFTER) {
                let silent = age(silent);
                writeln!(
                    out,
                    "  Its agent reported {silent} ago: the extender may call it stale."
                )?;
            }
        }
        if !self.refusals.is_empty() {
            writeln!(out, "\nOther nodes:")?;
        }
        for Count { nodes, reason } in &self.refusals {
            writeln!(out, "  {nodes:>5}  {reason}")?;
        }
        if !self.nearest.is_empty() {
            writeln!(out, "\nNearest GPUs:")?;
        }
        for near in &self.nearest {
            let lacks = match near.lacks {
                _ if !near.healthy => "takes no pods now".to_owned(),
                Mib::ZERO => "has the room, its node has too few such GPUs".to_owned(),
                lacks => format!("lacks {}", memory(lacks)),
            };
            let freed = match near.freed_by.as_slice() {
                [] => String::new(),
                pods => format!("; the end of {} would free it", pods.join(" and ")),
            };
            let room = memory(near.room);
            let line = format!("{} GPU {} ({})", near.node, near.gpu, near.model);
            writeln!(
                out,
                "  {}: room {room}, {lacks}{}",
                printable(&line),
                printable(&freed)
            )?;
        }
        if let Some(said) = &self.scheduler_said {
            writeln!(out, "\nkube-scheduler said: {}", printable(said))?;
        }
        Ok(())
    }
}
