//! `--once`: the agent's view of the cards, without a cluster.

use std::fmt::Write as _;
use std::ops::ControlFlow;
use std::sync::Arc;

use anyhow::{Context as _, Result};
use serde_json::{Value, json};

use crate::args::{Args, Output};
use crate::devices::{Card, Devices as _, NvmlDevices, Reading};
use crate::processes::{Processes, Who};

/// Looks once; the text to print.
///
/// # Errors
/// If there is nothing to be seen, with the reason.
pub fn once(args: &Args) -> Result<String> {
    let mut devices = NvmlDevices::new(args.nvml_path.clone(), args.refresh, Arc::default());
    let mut seen = None;
    devices.watch(&mut |reading| {
        seen = Some(reading);
        ControlFlow::Break(())
    })?;
    let reading = seen.context("the driver ended before its first answer")?;
    let mut processes = Processes::new(args.proc.clone());
    match args.output {
        Output::Json => Ok(serde_json::to_string_pretty(&as_json(
            &reading,
            &mut processes,
        ))?),
        Output::Text => Ok(as_text(&reading)),
    }
}

fn as_json(reading: &Reading, processes: &mut Processes) -> Value {
    let mut value = json!(reading);
    for (card, shown) in reading
        .cards
        .iter()
        .zip(value["cards"].as_array_mut().into_iter().flatten())
    {
        let list = shown["processes"].as_array_mut().into_iter().flatten();
        for (process, shown) in card.processes.iter().flatten().zip(list) {
            shown["of"] = match processes.who(process.pid) {
                Who::Pod(owner) => {
                    json!({ "pod": &*owner.pod, "container": owner.container.as_deref() })
                }
                Who::Host => json!("host"),
                Who::Gone => Value::Null,
            };
        }
    }
    value
}

fn as_text(reading: &Reading) -> String {
    let mut text = format!(
        "driver {}\n",
        reading.driver.as_deref().unwrap_or("unknown")
    );
    for card in &reading.cards {
        let Card {
            index, uuid, model, ..
        } = card;
        let memory = match (&card.memory, &card.failure) {
            (_, Some(failure)) => failure.clone(),
            (Some(memory), _) => format!(
                "{} of {} MiB used, {} reserved",
                memory.used >> 20,
                memory.total >> 20,
                memory.reserved >> 20
            ),
            (None, None) => "reports no memory of its own".to_owned(),
        };
        let processes = match &card.processes {
            Some(processes) => format!("{} processes", processes.len()),
            None => "processes unknown".to_owned(),
        };
        // Writing to a String cannot fail.
        let _ = writeln!(text, "{index} {uuid} {model}: {memory}, {processes}");
    }
    text
}
