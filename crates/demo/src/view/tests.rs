use ratatui::Terminal;
use ratatui::backend::TestBackend;

use super::*;

fn card(model: &str, gib: u64, pods: &[(&str, u64)]) -> CardPicture {
    let pods = pods.iter().map(|(pod, gib)| ((*pod).to_owned(), gib << 10));
    CardPicture {
        uuid: String::new(),
        model: model.to_owned(),
        total_mib: gib << 10,
        pods: pods.collect(),
    }
}

fn scene() -> Scene {
    let nodes = vec![
        NodePicture {
            name: "node-0".to_owned(),
            cards: vec![
                card("H100 80 GiB", 80, &[("llm-000", 40), ("chat-001", 20)]),
                card("H100 80 GiB", 80, &[("batch-002", 80)]),
            ],
        },
        NodePicture {
            name: "node-1".to_owned(),
            cards: vec![
                card("L40S 48 GiB", 48, &[("embed-003", 3)]),
                card("T4 16 GiB", 16, &[]),
            ],
        },
    ];
    Scene {
        now: Duration::from_secs(3 * 3600 + 25 * 60),
        picture: Picture {
            nodes,
            waiting: vec!["llm-004".to_owned(), "train-005".to_owned()],
            running: 4,
            lost: 0,
        },
        rows: vec![
            Row {
                running: 4,
                waiting: 2,
                allocated: 0.638,
                ..Row::default()
            },
            Row::default(),
        ],
        look: "kubectl gpustow ui".to_owned(),
    }
}

/// What is on a screen of that size.
fn screen(width: u16, height: u16) -> String {
    let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
    terminal.draw(|frame| draw(frame, &scene())).unwrap();
    let buffer = terminal.backend().buffer();
    let rows = buffer.content().chunks(width.max(1).into());
    let rows = rows.map(|row| row.iter().map(|cell| cell.symbol()).collect::<String>());
    rows.map(|row| row.trim_end().to_owned() + "\n").collect()
}

#[test]
fn every_card_is_a_bar_of_pods() {
    let expected = "\
gpustow  tight  03:25 of 12:00 h  63.8 % allocated                        4 running, 2 waiting, 0 finished
q: stop and sum up; in a browser: kubectl gpustow ui
node-0  2 × H100 80 GiB                               node-1  1 × L40S 48 GiB, 1 × T4 16 GiB
 0 [aaaaaaaaaaaaaaaaaaaabbbbbbbbbb..........]  75 %    0 [ddd.....................................]   6 %
 1 [cccccccccccccccccccccccccccccccccccccccc] 100 %    1 [........................................]   0 %

waiting: llm-004 train-005
";
    let shown = screen(106, 10);
    assert!(shown.starts_with(expected), "{shown}");
}

#[test]
fn a_small_terminal_shows_less() {
    let shown = screen(40, 10);
    assert!(shown.contains("lines more"), "{shown}");
    for (width, height) in [(0, 0), (1, 1), (3, 40), (10, 3), (40, 10), (300, 2)] {
        screen(width, height);
    }
}
