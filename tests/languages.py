"""A paragraph in each of ten languages, five sentences each, for tests of whatever reads text."""

PARAGRAPHS = {
    "zh": "清晨，雾还没有散去，渔民已经把船推进了河里。老张今年六十七岁，他说自己从八岁起就跟着父亲打鱼"
    "。“那时候河水很清，站在岸上就能看见鱼。”现在村里只剩下四条船，年轻人大多去了城里工作。不过他"
    "并不难过：孙女学会了织网，每个周末都回来帮忙。",
    "ja": "春になると、祖母は庭でえんどう豆を育て始めます。ガラスの瓶に種を入れ、窓ぎわに並べるのが毎年"
    "の習慣です。「芽が出たら電話するからね」と、祖母はいつも笑いながら言いました。今年は雨が多く"
    "、豆はなかなか大きくなりませんでした。それでも六月の終わりには、ボウルいっぱいの豆ごはんを家"
    "族で食べることができたのです。",
    "th": "ตลาดน้ำเปิดตั้งแต่เช้ามืด แม่ค้าพายเรือมาจากสวนพร้อมผักและผลไม้. ยายสมศรีขายขนมครกมาแล้วสี่สิบปี "
    "ลูกค้าหลายคนมาซื้อทุกวันอาทิตย์. เมื่อก่อนคนในหมู่บ้านเดินทางด้วยเรือเท่านั้น เพราะยังไม่มีถนน. "
    "ตอนนี้มีสะพานใหม่ข้ามคลอง แต่เด็กๆ ยังชอบกระโดดน้ำเล่นใต้ต้นไม้ใหญ่. "
    "ยายบอกว่าถ้าไม่มีเรือก็ไม่ใช่บ้านของเรา.",
    "hi": "गाँव के पुराने कुएँ के पास एक नीम का पेड़ है। गर्मियों में बच्चे उसकी छाया में बैठकर कहानियाँ "
    "सुनते हैं। दादी कहती हैं कि यह पेड़ उनकी शादी से पहले लगाया गया था। पिछले साल आँधी में इसकी "
    "एक बड़ी शाखा टूट गई। फिर भी वसंत आते ही नई पत्तियाँ निकलीं और चिड़ियों ने अपना घोंसला बना लिया।",
    "ar": "في آخر الشارع مكتبة صغيرة تفتح أبوابها بعد صلاة العصر. يجلس صاحبها، العمّ إبراهيم، على كرسيّ "
    "خشبيٍّ ويقرأ لزبائنه قصصًا قصيرة. قال لي مرّةً: «الكتاب الذي لا يُقرأ بصوتٍ عالٍ ينام». بعت له "
    "دراجتي القديمة مقابل سبعة كتب. هل كان ذلك ثمنًا عادلًا؟",
    "ko": "할머니의 부엌에는 언제나 참기름 냄새가 났다. 겨울이 오면 온 가족이 모여 김치를 담갔고, "
    "아이들은 마당에서 무를 씻었다. 막내 삼촌은 고춧가루를 너무 많이 넣는다고 꾸중을 들었다. "
    "올해는 할머니가 편찮으셔서 우리끼리 해 보았다. 맛이 조금 달랐지만 할머니는 웃으며 한 그릇을 "
    "다 드셨다.",
    "ru": "Старый трамвай медленно поднимался в гору, и стёкла его дребезжали на каждом стыке. "
    "Вагоновожатая Нина Петровна знала всех пассажиров по именам. Её маршрут должны были закрыть "
    "ещё весной, но жители написали письмо. «Без трамвая мы разучимся опаздывать», — шутил "
    "сосед. Теперь по вечерам в депо снова горит свет, а в июне обещают новые рельсы.",
    "de": "Hinter der Mühle beginnt ein schmaler Weg, den früher nur die Müller benutzten. Über dem "
    "Bach hängt eine Brücke aus Holz und rostigen Drähten. Großvater übersprang stets die dritte "
    "Stufe, weil sie knarrte. Im Herbst führte das Hochwasser zwei Bretter mit sich fort. "
    "Seitdem müssen wir außen herumgehen, doch die Äpfel auf der anderen Seite schmecken süßer "
    "als je zuvor.",
    "tr": "Yağmur dindiğinde çocuklar sokağa çıkıp kâğıttan gemiler yüzdürdüler. Işıl'ın gemisi "
    "köşedeki mazgala kadar gitti, İlker'inki ise hemen battı. Fırıncı Şükrü Amca kapıdan "
    "gülerek onları izliyordu. Öğleden sonra güneş açtı ve su birikintileri küçüldü. Akşam eve "
    "dönerken ikisi de ıslak çoraplarını annelerinden sakladılar.",
    "vi": "Mỗi sáng, bà ngoại tôi quét lá khế trước sân rồi mới pha trà. Con mèo mướp nằm dưới ghế, "
    "chờ được vuốt ve. Bà kể rằng ngày xưa cả xóm chỉ có một chiếc đài nhỏ. Tối đến, mọi người "
    "ngồi quây quần để nghe cải lương. Bây giờ nhà nào cũng có tivi, nhưng bà vẫn giữ chiếc đài "
    "ấy bên cửa sổ.",
}
"""By the code of ``data.language``."""

HARD = [
    "",
    " \t ",
    "Crème brûlée, naïve façade — Ångström İstanbul ẞtraße ǅungla",
    "e\u0301cole E\u0301COLE n\u0303 \u0300 alone",
    "東京は日本の首都です。 北京大学 한국어 텍스트 ไทย עברית العَرَبِيَّة हिन्दी",
    "a\x00b\x01c\x7fd\u200be\ufefff\ufffdg\u2028h\u00a0i\u3000j\r\nk\tl",
    "😀 👩‍👩‍👧‍👦 🇫🇷 text😀text ☃ ♥️",
    "x" * 99 + " " + "x" * 100 + " " + "x" * 101 + " " + "é" * 150,
    "The capital of [MASK] is [MASK].[SEP]And[CLS] [PAD] [UNK] then [mask] [ MASK ] [MASK",
    "it's don't U.S.A. 3,000.50 $5 <b>tag</b> a_b @user #tag http://x.y/?z=1&w=2 ^~`|",
    "##ing ## # ing ##",
    "\ud7ff \ue000 \U0001f9d1 \U00020000 \U0010ffff",
    "ﬁ ﬂ Ａ １ ² ½ ⅷ",
]
"""All that is awkward in text."""

NUM_SENTENCES = 5
"""Number of sentences per paragraph."""

ALL_KEPT = ("zh", "ja", "th", "hi", "ar", "ko")
"""Languages of which the default vocabulary keeps every letter and mark."""


def training_texts(language: str) -> list[str]:
    """The paragraph, often enough that all of its characters are in a vocabulary."""
    return [PARAGRAPHS[language]] * 20
