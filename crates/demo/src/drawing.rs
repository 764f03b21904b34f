//! A node with whole GPUs and with gpustow, side by side in characters.

use std::time::Duration;

use super::device_plugin::Cluster;
use super::picture::{CardPicture, Frame};
use super::report::clock;

/// When the clusters are drawn.
const AT: Duration = Duration::from_secs(6 * 3600);
/// Characters of a GPU.
const WIDTH: usize = 32;

/// Both clusters' first node at [`AT`].
pub(crate) fn side_by_side(whole: &mut Cluster<'_>, ours: &[Frame]) -> String {
    whole.live(AT);
    let whole = whole.picture();
    let ours = ours.iter().find(|frame| frame.at >= AT);
    let pair = whole
        .nodes
        .first()
        .zip(ours.and_then(|it| it.picture.nodes.first()));
    let Some((whole, ours)) = pair else {
        return String::new();
    };
    let mut text = format!(
        "\n{} at {} h\n{:7}{:34}gpustow\n",
        ours.name,
        clock(AT),
        "",
        "whole GPUs"
    );
    for (number, (whole, ours)) in whole.cards.iter().zip(&ours.cards).enumerate() {
        text += &format!("GPU {number}  {}  {}\n", bar(whole), bar(ours));
    }
    let gib = whole
        .cards
        .first()
        .map_or(0.0, |card| card.total_mib as f64 / 1024.0);
    text += &format!(
        "A pod is the first letter of its name; a capital begins it. {WIDTH} characters are {gib:.0} GiB, dots idle.\n\n"
    );
    text
}

/// The pods on a GPU, as long as their memory.
fn bar(card: &CardPicture) -> String {
    let along = |mib: u64| (mib * WIDTH as u64 / card.total_mib.max(1)) as usize;
    let (mut text, mut held) = (String::new(), 0);
    for (pod, mib) in &card.pods {
        held += mib;
        let letter = &pod[..pod.len().min(1)];
        let length = along(held).saturating_sub(text.len());
        text += &letter
            .repeat(length)
            .replacen(letter, &letter.to_uppercase(), 1);
    }
    format!("{text:.<WIDTH$}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bar_is_as_long_as_the_memory_of_its_pods() {
        let pods = [("llm-001", 40), ("chat-002", 10), ("embed-003", 5)];
        let card = CardPicture {
            total_mib: 80,
            pods: pods.map(|(name, mib)| (name.to_owned(), mib)).to_vec(),
            ..CardPicture::default()
        };
        assert_eq!(bar(&card), "LlllllllllllllllCcccEe..........");
    }
}
